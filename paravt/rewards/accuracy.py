"""How right an answer is, in [0, 1].

    mcq   1 if the letter read is the gold letter, else 0
    tvg   intersection over union of the two spans; a span far longer than the truth has a small one
    oe    F1 of the token multisets, or exact match, or a judge's verdict that was fetched before

The answer is read by the readers of `paravt.protocol`, the same in rewards and benchmarks. An accuracy that
cannot be known (a failed episode, a missing verdict, an empty gold answer) is None with a reason, never 0.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from paravt.protocol import read_choice, read_open, read_span
from paravt.rollout import Sample

Outcome = tuple[float | None, str | None]


def answer_accuracy(
    answer: str | None,
    sample: Sample,
    open_ended: Literal["f1", "exact", "judge"] = "f1",
    judge_verdict: float | None = None,
) -> Outcome:
    """(accuracy, reason): the reason says why the accuracy is None, or why nothing could be read."""
    if sample.question_type == "oe" and not read_open(sample.answer):
        return None, "the gold answer is empty"
    if answer is None or not answer.strip():
        return 0.0, "no answer"
    if sample.question_type == "mcq":
        choice = read_choice(answer, sample.options)
        if choice is None:
            return 0.0, "no single choice in the answer"
        return float(choice == sample.answer), None
    if sample.question_type == "tvg":
        span = read_span(answer)
        if span is None:
            return 0.0, "no single span in the answer"
        return span_iou(span, sample.answer), None
    if not read_open(answer):
        return 0.0, "no words in the answer"
    if open_ended == "judge":
        return _verdict(judge_verdict)
    if open_ended == "exact":
        return float(read_open(answer) == read_open(sample.answer)), None
    return token_f1(answer, sample.answer), None


def span_iou(span: tuple[float, float], gold: tuple[float, float]) -> float:
    """Intersection over union of two spans in seconds; spans of no length must be equal."""
    common = max(0.0, min(span[1], gold[1]) - max(span[0], gold[0]))
    union = (span[1] - span[0]) + (gold[1] - gold[0]) - common
    return common / union if union > 0 else float(span == gold)


def token_f1(answer: str, gold: str) -> float:
    """2 x common / (answer tokens + gold tokens), counted as multisets: a repeated token is common only as
    often as the gold answer has it.
    """
    said, true = Counter(read_open(answer).split()), Counter(read_open(gold).split())
    total = said.total() + true.total()
    return 2 * (said & true).total() / total if total else 0.0


def _verdict(verdict: float | None) -> Outcome:
    if verdict is None:
        return None, "the judge's verdict is missing"
    if not 0 <= verdict <= 1:
        return None, "the judge's verdict is outside 0 to 1"
    return float(verdict), None
