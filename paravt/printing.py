"""An episode as a person reads it, and as a program does."""

from __future__ import annotations

from paravt.protocol import read_choice
from paravt.rollout import Execution, Rollout, Sample, ToolCall

INDENT = "     "


def answer_json(rollout: Rollout, sample: Sample) -> dict:
    """What `paravt ask --json` prints: the answer, what was looked at, and how long it took."""
    return {
        "video": sample.video,
        "question": sample.question,
        "options": list(sample.options),
        "answer": rollout.answer,
        "choice": read_choice(rollout.answer, sample.options) if sample.options else None,
        "stop_reason": rollout.stop_reason,
        "error": rollout.error,
        "frames_seen": rollout.frames_seen,
        "looks": [_look_json(execution) for execution in rollout.executions],
        "turns": [turn.text for turn in rollout.turns],
        "seconds": {name: round(value, 3) for name, value in rollout.seconds.items()},
    }


def answer_text(rollout: Rollout, sample: Sample) -> str:
    """What `paravt ask` prints: windows, reports, the answer, timings."""
    lines = [f"frames   {rollout.frames_seen} of the whole video"]
    lines += _looks(rollout.executions) or ["looks    none"]
    lines += [f"answer   {_answer(rollout, sample)}", f"time     {timings(rollout)}"]
    return "\n".join(lines)


def episode_text(rollout: Rollout) -> str:
    """Every turn of an episode with what it ran, and how it ended."""
    lines = [
        f"episode {rollout.sample_id}: {rollout.frames_seen} frames seen (budget {rollout.frame_budget}), "
        f"{rollout.call_count} calls run, {'well' if rollout.compliant else 'not well'} formed"
    ]
    for number, turn in enumerate(rollout.turns, 1):
        notes = ["answer asked for"] * turn.forced_answer + ["cut at the limit"] * (
            turn.finish_reason == "length"
        )
        lines += ["", f"turn {number}" + (f" ({', '.join(notes)})" if notes else ""), _indented(turn.text)]
        lines += _looks(turn.executions)
    lines += [
        "",
        f"answer   {rollout.answer if rollout.answer is not None else 'none'} ({rollout.stop_reason})",
    ]
    if rollout.error:
        lines.append(f"error    {rollout.error}")
    return "\n".join([*lines, f"time     {timings(rollout)}"])


def episode_line(index: int, rollout: Rollout) -> str:
    """One line about an episode."""
    ended = f"{rollout.stop_reason}  {rollout.call_count} calls  {rollout.answer!r}"
    return f"{index:4}  {rollout.sample_id}  {ended}"


def timings(rollout: Rollout) -> str:
    """Seconds by part, the total last."""
    parts = [f"{name} {value:.2f} s" for name, value in rollout.seconds.items() if name != "total"]
    total = rollout.seconds.get("total", sum(rollout.seconds.values()))
    return ", ".join([*parts, f"total {total:.2f} s"])


def _answer(rollout: Rollout, sample: Sample) -> str:
    if rollout.answer is None:
        return f"none ({rollout.stop_reason.replace('_', ' ')})"
    letter = read_choice(rollout.answer, sample.options) if sample.options else None
    if letter is None:
        return rollout.answer
    return f"{letter}. {sample.options[ord(letter) - ord('A')]}"


def _looks(executions: list[Execution] | tuple[Execution, ...]) -> list[str]:
    lines = []
    for number, execution in enumerate(executions, 1):
        if execution.window_s is None:
            what = f"call not run ({execution.status.replace('_', ' ')}): {_call(execution)}"
        else:
            start_s, end_s = execution.window_s
            what = (
                f"{start_s:.1f} to {end_s:.1f} s, {len(execution.times_s)} frames, {execution.seconds:.2f} s"
            )
            what += ", cut to the video" if execution.clamped else ""
        lines += [f"look {number:<3} {what}", _indented(execution.report)]
    return lines


def _call(execution: Execution) -> str:
    call = execution.call
    if not isinstance(call, ToolCall):
        return "not readable"
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _look_json(execution: Execution) -> dict:
    return {
        "call": _call(execution),
        "status": execution.status,
        "window_s": list(execution.window_s) if execution.window_s else None,
        "times_s": list(execution.times_s),
        "clamped": execution.clamped,
        "report": execution.report,
        "error": execution.error,
        "seconds": round(execution.seconds, 3),
    }


def _indented(text: str) -> str:
    return "\n".join(f"{INDENT}{line}" for line in text.splitlines())
