"""A rollout as a tree of spans: main turn, each crop with its sub-agent, gather, next turn.

    episode
      main turn 1          the model's text, and the calls read from it
      crop 12.0-15.0 s     arguments, window, frame times      (crops of a turn lie side by side)
        sub-agent          the report
      gather               the texts that went back, in call order
      main turn 2          ... the answer

The tree is plain JSON with times in seconds from the episode's start, so it can wait on disk until tracking
answers. A rollout knows how long each crop took, and how long the main agent wrote in all; that is shared
among its turns by the tokens they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, ToolCall

SHORTEST_S = 0.001
Span = dict[str, Any]


def episode(rollout: Rollout, sample: Sample | None = None, step: int | None = None) -> Span:
    """The tree of one rollout; with its sample, the question and the right answer are in it."""
    waits = [max((item.seconds for item in turn.executions), default=0.0) for turn in rollout.turns]
    tokens = [max(1, turn.span[1] - turn.span[0]) for turn in rollout.turns]
    total = max(_total_s(rollout), sum(waits) + SHORTEST_S)
    writing = rollout.seconds.get("main") or total - sum(waits)
    children: list[Span] = []
    now = 0.0
    for number, (turn, wait) in enumerate(zip(rollout.turns, waits, strict=True), 1):
        length = writing * tokens[number - 1] / sum(tokens)
        children.append(_turn(turn, number, now, now + length))
        now += length
        if turn.executions:
            children.extend(_crop(item, place, now) for place, item in enumerate(turn.executions, 1))
            now += wait
            children.append(_gather(turn.executions, now))
    # the list of traces shows how these begin
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {"answer": rollout.answer}
    if sample is not None:
        inputs = {"question": sample.question, "options": list(sample.options), "video": sample.video}
        outputs["right answer"] = sample.answer
    inputs |= {"frame budget": rollout.frame_budget, "sample": rollout.sample_id}
    outputs["stop reason"] = rollout.stop_reason
    return _span(
        f"episode {rollout.sample_id}",
        "AGENT",
        0.0,
        max(total, now),
        inputs,
        outputs,
        {
            "frames seen": rollout.frames_seen,
            "crops run": rollout.call_count,
            "format compliant": rollout.compliant,
            "weight versions": list(rollout.weight_versions),
            "step": step,
        },
        children,
        rollout.error,
    )


def choose(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """At most `count`: first one that cropped, then one that broke the format, then the others in order."""
    cropped = [item for item in rollouts if item.call_count]
    broken = [item for item in rollouts if not item.compliant]
    chosen: list[Rollout] = []
    for item in [*cropped[:1], *broken[:1], *rollouts]:
        if len(chosen) < count and not any(item is other for other in chosen):
            chosen.append(item)
    return chosen


def send(tree: Span, start_s: float, experiment_id: str, run_id: str) -> str:
    """Write one tree to MLflow with its explicit times; returns the trace id."""
    import mlflow
    from mlflow.tracing.constant import TraceMetadataKey

    def nanoseconds(seconds: float) -> int:
        return int((start_s + seconds) * 1e9)

    def write(span: Span, parent: Any = None) -> Any:
        live = mlflow.start_span_no_context(
            span["name"],
            span_type=span["type"],
            parent_span=parent,
            inputs=span["inputs"],
            attributes=span["attributes"],
            experiment_id=experiment_id if parent is None else None,
            metadata={TraceMetadataKey.SOURCE_RUN: run_id} if parent is None else None,
            start_time_ns=nanoseconds(span["start_s"]),
        )
        live.set_outputs(span["outputs"])
        for child in span["children"]:
            write(child, live)
        live.end(status="ERROR" if span["error"] else "OK", end_time_ns=nanoseconds(span["end_s"]))
        return live

    return write(tree).trace_id


def _span(
    name: str,
    kind: str,
    start_s: float,
    end_s: float,
    inputs: Any,
    outputs: Any,
    attributes: dict[str, Any] | None = None,
    children: list[Span] | None = None,
    error: str | None = None,
) -> Span:
    known = {key: value for key, value in (attributes or {}).items() if value is not None}
    if error:
        known["error"] = error
    return {
        "name": name,
        "type": kind,
        "start_s": start_s,
        "end_s": max(end_s, start_s + SHORTEST_S),
        "inputs": inputs,
        "outputs": outputs,
        "attributes": known,
        "children": children or [],
        "error": error,
    }


def _turn(turn: EpisodeTurn, number: int, start_s: float, end_s: float) -> Span:
    calls = [_call(execution) for execution in turn.executions]
    return _span(
        f"main turn {number}" + (" (answer asked for)" if turn.forced_answer else ""),
        "LLM",
        start_s,
        end_s,
        {"forced answer": turn.forced_answer},
        {"text": turn.text, "calls": calls, "answer": turn.parsed.answer},
        {
            "tokens": turn.span[1] - turn.span[0],
            "finish reason": turn.finish_reason,
            "well formed": turn.parsed.well_formed,
        },
    )


def _crop(execution: Execution, place: int, start_s: float) -> Span:
    window = execution.window_s
    name = f"crop {window[0]:.1f}-{window[1]:.1f} s" if window else f"call {place}: {execution.status}"
    end_s = start_s + max(execution.seconds, SHORTEST_S)
    children = []
    if execution.status == "ok":
        seen = {"window_s": window, "times_s": list(execution.times_s)}
        children = [
            _span(
                "sub-agent",
                "LLM",
                start_s,
                end_s,
                seen,
                {"report": execution.report},
                {"truncated": execution.truncated},
            )
        ]
    return _span(
        name,
        "TOOL",
        start_s,
        end_s,
        _call(execution),
        {"status": execution.status, "window_s": window, "frame times_s": list(execution.times_s)},
        {"clamped": execution.clamped, "seconds": execution.seconds},
        children,
        execution.error or (execution.report if execution.status != "ok" else None),
    )


def _gather(executions: Sequence[Execution], start_s: float) -> Span:
    return _span(
        "gather",
        "CHAIN",
        start_s,
        start_s + SHORTEST_S,
        {"calls": [_call(execution) for execution in executions]},
        {"texts": [execution.report for execution in executions]},
    )


def _call(execution: Execution) -> dict[str, Any]:
    call = execution.call
    if isinstance(call, ToolCall):
        return {"name": call.name, "arguments": call.arguments, "style": call.style}
    return {"malformed": call.message}


def _total_s(rollout: Rollout) -> float:
    return rollout.seconds.get("total") or sum(rollout.seconds.values())
