"""Published SFT rows -> traces in our grammar.

Published traces make one call a turn and get frames back; ours make independent calls at once and get words.

    row       user  | think, call | frames      | think, call | frames  | think, answer
    trace             think, calls| reports                             | think, answer

1. The system text goes: the prompt is ours, one for all. The question is cut out of the user's text.
2. Each assistant text is read by `paravt.protocol.parse_turn`, the only parser there is.
3. A report takes the place of returned frames: of the row's own words (a text in the tool's answer, else what
   the next think says that it sees), or one that a model wrote for the same window (`reports`).
4. Two calls in a row become one turn if the second does not build on the first: its think looks back at
   nothing, the windows do not overlap, and both have reports of their own.
5. Turns are written anew: think, calls as JSON with times in seconds inside the video, answer.

A row that comes out as it went in has `passed`, one that was changed is `converted`, and one that cannot be
used is `set aside`, with a reason. Every trace that leaves has been judged by the checks of `data.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
import json
import math
import re
from typing import Any, Literal

from paravt import protocol
from paravt.data.checks import OK, check_roles, check_targets, check_windows
from paravt.data.questions import read_gold, read_question
from paravt.data.schema import TraceRow, TraceTurn, VideoFacts
from paravt.data.sentinel import RowError, media_of, read_messages, text_of
from paravt.data.steps import MIN_REPORT_WORDS, SENTENCE, Step, read_steps, window_of
from paravt.hashing import stable_hash
from paravt.rollout import Sample, ToolCall

Status = Literal["passed", "converted", "set aside"]
Windows = dict[tuple[str, float, float], str]

SPAN_SLACK_S = 1.0  # annotations of public sets end up to a second after their video
_LOOKS_BACK = re.compile(
    r"""\b(?:the|this|that|these|those)\s+(?:\w+\s+)?(?:clip|crop|frames?|segment|report|result|response)s?\b
        | \b(?:shows?|showed|reveal(?:s|ed)?|did\s+not|didn['’]t|returned|now\s+I|I\s+(?:can\s+)?see)\b
        | \b(?:still|earlier|later|instead|wrong|however|again|already)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"""\b(?:answer|options?|question|correct|choice|therefore|thus|hence|conclude|so|tool|crop_video|call)\b
        | \b(?:I|we)\s+(?:need|should|will|must|can\s+now)\b | \blet['’]?s?\s+(?:me\b)?""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Rules:
    """What of a trace is ours to decide. `with_path`: calls name the video, as the agentic prompt asks."""

    budgets: tuple[int, ...]
    max_turns: int = 3
    max_calls: int = 5
    merge: bool = True
    with_path: bool = True
    seed: int = 1
    reports: Windows | None = None
    """Reports that a model wrote, by (video, start, end) in tenths of a second; None: the row's own."""


@dataclass(frozen=True)
class Outcome:
    """What became of a row."""

    status: Status
    reason: str = ""
    trace: TraceRow | None = None
    merged: int = 0
    """Calls that joined an earlier one's turn."""


def convert(
    row: Mapping[str, Any],
    identity: str,
    source: str,
    find: Callable[[str], str],
    video_of: Callable[[str], str],
    facts_of: Callable[[str], VideoFacts],
    rules: Rules,
) -> Outcome:
    """The trace of one published row, or why there is none.

    `find` gives the media path of a URL, `video_of` what a table writes for it, `facts_of` what is known of
    the file.
    """
    try:
        return _convert(row, identity, source, find, video_of, facts_of, rules)
    except RowError as error:
        return Outcome("set aside", str(error))


def window_key(video: str, start_s: float, end_s: float) -> tuple[str, float, float]:
    """How a window's report is found: times in tenths of a second, as calls write them."""
    return video, round(start_s, 1), round(end_s, 1)


def wanted_reports(
    row: Mapping[str, Any],
    find: Callable[[str], str],
    video_of: Callable[[str], str],
    facts_of: Callable[[str], VideoFacts],
) -> list[tuple[str, float, float]]:
    """The windows of a row whose frames came back without words, for a model to report on.

    None for a row that cannot be used: it is counted when it is converted.
    """
    try:
        messages, video, duration_s = _opened(row, find, video_of, facts_of)
        return [
            window_key(video, *window_of(call, duration_s))
            for step in read_steps(messages[1:])[0]
            for call, report in zip(step.calls, step.reports, strict=True)
            if report is None
        ]
    except RowError:
        return []


def _opened(row, find, video_of, facts_of) -> tuple[list[dict[str, Any]], str, float]:
    """The messages without the system's, the path that tables write for the video, and its seconds."""
    messages = [m for m in read_messages(row.get("messages")) if m["role"] != "system"]
    if not messages or messages[0]["role"] != "user":
        raise RowError("its first message is not the user's")
    urls = [url for _, url in media_of(messages[0])]
    if len(urls) != 1:
        raise RowError("it has no video or image" if not urls else "it has several videos or images")
    path = find(urls[0])
    facts = facts_of(path)
    if facts.problem or facts.duration_s is None:
        raise RowError(f"its video cannot be used ({(facts.problem or 'no duration').partition(':')[0]})")
    return messages, video_of(path), facts.duration_s


def _convert(row, identity, source, find, video_of, facts_of, rules: Rules) -> Outcome:
    messages, video, duration_s = _opened(row, find, video_of, facts_of)
    steps, last = read_steps(messages[1:])
    asked = read_question(text_of(messages[0]))
    kind, gold = read_gold(last.answer, asked, None)
    if kind == "tvg":
        gold = inside(gold, duration_s)
    sample = Sample(
        id=identity,
        video=video,
        question=asked.question,
        answer=gold,
        question_type=kind,
        options=asked.options if kind == "mcq" else (),
        meta={"source": source, "duration_s": duration_s},
    )
    steps = _with_reports(steps, last.think or "", video, duration_s, rules)
    joined = _merged(steps, duration_s, rules) if rules.merge else steps
    if len(joined) > rules.max_turns:
        raise RowError(f"it has {len(joined)} tool turns, more than max_turns {rules.max_turns}")
    turns: list[TraceTurn] = []
    for step in joined:
        turns.append(TraceTurn("assistant", _dispatch(step, sample, duration_s, rules)))
        turns.append(TraceTurn("tool", results=tuple(report or "" for report in step.reports)))
    turns.append(TraceTurn("assistant", f"<think>\n{last.think}\n</think>\n<answer>{last.answer}</answer>"))
    budget = rules.budgets[stable_hash(rules.seed, "sft budget", identity) % len(rules.budgets)]
    trace = TraceRow(identity, sample, budget, "main", tuple(turns))
    _judge(trace, duration_s)
    before = [_squeezed(text_of(message)) for message in messages[1:]]
    same = before == [_squeezed(_published(turn)) for turn in turns]
    return Outcome("passed" if same else "converted", trace=trace, merged=len(steps) - len(joined))


def _with_reports(
    steps: Sequence[Step], last_think: str, video: str, duration_s: float, rules: Rules
) -> list[Step]:
    """Each call with its report. Raises RowError where there is none to be had."""
    thinks = [*(step.think for step in steps), last_think][1:]
    found: list[Step] = []
    for step, after in zip(steps, thinks, strict=True):
        reports = list(step.reports)
        for number, call in enumerate(step.calls):
            if reports[number]:
                continue
            if rules.reports is not None:
                start_s, end_s = window_of(call, duration_s)
                reports[number] = rules.reports.get(window_key(video, start_s, end_s))
            elif len(step.calls) == 1:
                reports[number] = _seen(after, step.think)
        if not all(reports):
            raise RowError("no report takes the place of its returned frames")
        found.append(replace(step, reports=tuple(reports)))
    return found


def _seen(think: str, before: str) -> str | None:
    """What a think newly says that it sees: sentences that look at the clip and conclude nothing."""
    kept = [
        sentence
        for sentence in map(str.strip, SENTENCE.split(think))
        if sentence and sentence not in before and _LOOKS_BACK.search(sentence)
        if not _CONCLUDES.search(sentence)
    ]
    report = " ".join(kept)
    return report if len(report.split()) >= MIN_REPORT_WORDS else None


def _merged(steps: Sequence[Step], duration_s: float, rules: Rules) -> list[Step]:
    joined: list[Step] = []
    for step in steps:
        before = joined[-1] if joined else None
        if (
            before is None
            or len(before.calls) + len(step.calls) > rules.max_calls
            or _LOOKS_BACK.search(step.think)
            or _overlap(before.calls, step.calls, duration_s)
        ):
            joined.append(step)
            continue
        think = "\n".join(dict.fromkeys((before.think, step.think)))
        joined[-1] = Step(think, before.calls + step.calls, before.reports + step.reports)
    return joined


def _overlap(first: Sequence[ToolCall], second: Sequence[ToolCall], duration_s: float) -> bool:
    windows = [window_of(call, duration_s) for call in first]
    return any(
        start < other_end and other_start < end
        for start, end in (window_of(call, duration_s) for call in second)
        for other_start, other_end in windows
    )


def _dispatch(step: Step, sample: Sample, duration_s: float, rules: Rules) -> str:
    calls = []
    for call in step.calls:
        start_s, end_s = window_of(call, duration_s)
        arguments: dict[str, Any] = (
            {"video_path": protocol.video_name(sample.video)} if rules.with_path else {}
        )
        # the end is cut to two digits, not rounded: a window must not end after its video
        end_s = max(math.floor(end_s * 100 + 1e-6) / 100, round(start_s, 2))
        arguments |= {"start_time": round(start_s, 2), "end_time": end_s}
        if "num_frames" in call.arguments:
            arguments["num_frames"] = call.arguments["num_frames"]
        body = json.dumps({"name": protocol.TOOL_NAME, "arguments": arguments}, ensure_ascii=False)
        calls.append(f"<tool_call>\n{body}\n</tool_call>")
    return f"<think>\n{step.think}\n</think>\n" + "\n".join(calls)


def inside(span_s: tuple[float, float], duration_s: float) -> tuple[float, float]:
    """A gold span cut to its video of `duration_s` seconds. Raises RowError if it lies outside."""
    start_s, end_s = span_s
    if end_s > duration_s + SPAN_SLACK_S or start_s >= duration_s:
        raise RowError("its answer lies outside its video")
    return start_s, min(end_s, duration_s)


def _judge(trace: TraceRow, duration_s: float) -> None:
    turns = trace.to_json()["turns"]
    for fault in (
        check_roles(trace.kind, turns),
        check_targets(trace.kind, turns),
        check_windows(trace.kind, turns, None, duration_s),
    ):
        if fault != OK:
            raise RowError(f"its trace is not in the grammar: {re.sub(r'[0-9.]+', 'n', fault)}")


def _published(turn: TraceTurn) -> str:
    """A turn of ours as a published message writes it."""
    if turn.role == "assistant":
        return turn.text
    return "".join(f"<tool_response>{result}</tool_response>" for result in turn.results)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
