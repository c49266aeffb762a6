"""Whether a candidate may take the champion's place: a paired bootstrap on the same questions.

    gain = mean over questions of (candidate - standing), each the mean of the question's strict greedy scores
           over the frame budgets that both were asked at

The candidate is better if the 95 % interval of the gain lies above 0. It is refused all the same if its
format compliance, at the highest temperature that both have, is lower beyond noise: accuracy that was bought
with a format that falls apart under sampling does not last.

Results are comparable if the tags of both versions say the same of what was asked: the questions, the videos
under them, and the protocol (`other_asking`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paravt.benchmarks.results import Result
from paravt.benchmarks.statistics import Difference
from stages.figures import accuracy, compliance, difference

QUESTIONS, VIDEOS, PROTOCOL = "questions.md5", "dvc.in.data/needles", "protocol"


def other_asking(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What the version with the tags `theirs` did otherwise than the one with `mine`; empty if it was asked
    the same questions in the same way.
    """
    if mine.get(QUESTIONS) != theirs.get(QUESTIONS):
        return "answered other questions"
    if mine.get(VIDEOS) != theirs.get(VIDEOS):
        return f"saw other videos (tag {VIDEOS})"
    if mine.get(PROTOCOL) != theirs.get(PROTOCOL):
        return "was asked with other settings of episode, visual or reward"
    return ""


@dataclass(frozen=True)
class Decision:
    """`reason` is one sentence, with the figures it stands on; `gain` is None if nothing can be compared."""

    better: bool
    reason: str
    gain: Difference | None = None


def decide(candidate: Sequence[Result], standing: Sequence[Result]) -> Decision:
    """Whether `candidate` may take the place of `standing`, who was asked the same questions."""
    gain, words = _compared(candidate, standing)
    if gain is None:
        return Decision(False, words)
    if not (gain.clear and gain.mean > 0):
        return Decision(False, f"not better beyond noise: {words}", gain)
    lost = _compliance_lost(candidate, standing)
    if lost:
        return Decision(False, f"{lost}, although better in {words}", gain)
    return Decision(True, f"better beyond noise: {words}", gain)


def stands(now: Sequence[Result], then: Sequence[Result]) -> tuple[bool | None, str]:
    """Whether a model that is asked again does as well as it did: (False if worse beyond noise, why).

    None if nothing can be compared.
    """
    gain, words = _compared(now, then)
    if gain is None:
        return None, words
    if gain.clear and gain.mean < 0:
        return False, f"worse beyond noise than it was: {words}"
    lost = _compliance_lost(now, then)
    return (False, f"{lost}; {words}") if lost else (True, f"not worse beyond noise than it was: {words}")


def _compared(first: Sequence[Result], second: Sequence[Result]) -> tuple[Difference | None, str]:
    """The gain of `first` over `second` in strict greedy accuracy, and the figures in words."""
    budgets = sorted(_budgets(first) & _budgets(second))
    mine, theirs = _scores(first, budgets), _scores(second, budgets)
    gain = difference([theirs], [mine])
    if gain is None:
        return None, "no question and frame budget in common, so nothing can be compared"
    shared = [name for name in mine if name in theirs]
    after, before = (sum(found[name] for name in shared) / len(shared) for found in (mine, theirs))
    return gain, (
        f"greedy accuracy {after:.3f} against {before:.3f}, {_interval(gain)} over {gain.questions} "
        f"questions at K = {', '.join(map(str, budgets))}"
    )


def _compliance_lost(candidate: Sequence[Result], standing: Sequence[Result]) -> str:
    temperatures = _temperatures(candidate) & _temperatures(standing)
    if not temperatures:
        return ""
    measure = compliance(max(temperatures))
    change = difference([measure.of(standing)], [measure.of(candidate)])
    if change is None or not (change.clear and change.mean < 0):
        return ""
    return f"worse in {measure.label}, {_interval(change)}"


def _scores(results: Sequence[Result], budgets: Sequence[int]) -> dict[str, float]:
    """The mean over `budgets` of a question's strict scores, for those asked at all of them."""
    parts = [accuracy(budget, "all").of(results) for budget in budgets]
    if not parts:
        return {}
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: sum(part[name] for part in parts) / len(parts) for name in names}


def _budgets(results: Sequence[Result]) -> set[int]:
    return {result.budget for result in results if not result.temperature}


def _temperatures(results: Sequence[Result]) -> set[float]:
    return {result.temperature for result in results} - {0.0}


def _interval(change: Difference) -> str:
    return f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
