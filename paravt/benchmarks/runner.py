"""Ask a benchmark's questions: each ends answered, unparsed, failed(reason) or skipped(reason).

    key = hash(sample, its file, frame budget, prompt mode and episode, frames and pixels, sampling and seed,
               scoring, model weights, code that shapes prompt, episode or score)

A finished answer is reused only under its own key. Questions are asked in fixed chunks; when one question
breaks its chunk, the chunk is asked again one by one, so that a failure is charged to the question it is of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
import hashlib
from pathlib import Path
import time
from typing import TYPE_CHECKING, Any

from paravt.benchmarks.registry import Benchmark
from paravt.benchmarks.results import UNJUDGED, Result, ResultStore, canonical_hash, unjudged
from paravt.config import EpisodeConfig, RewardConfig, VisualConfig
from paravt.data.media import on_this_machine
from paravt.engines.base import EngineError
from paravt.protocol import read_choice, read_open, read_span, video_name
from paravt.reporter import Reporter
from paravt.rewards import score
from paravt.rollout import Rollout, Sample
from paravt.video import file_paths

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.engines import Engine
    from paravt.protocol.upstream import Upstream

CHUNK = 64
EDGE_BYTES = 1 << 20
# What one question may raise: an engine, a file, a prompt too long, memory. Anything else is a fault of the
# program and ends the run.
QUESTION_ERRORS = (RuntimeError, ValueError, OSError, MemoryError)
SHAPING = (
    "protocol",
    "rewards",
    "engines",
    "reading",
    "agent.py",
    "benchmarks/runner.py",
    "chat.py",
    "conversation.py",
    "data/media.py",
    "episode.py",
    "footage.py",
    "hashing.py",
    "model.py",
    "prompting.py",
    "rollout.py",
    "segments.py",
    "times.py",
    "video.py",
    "weights.py",
)

Ask = Callable[[Sequence[Sample], int], list[Rollout]]
# (sample, answer) pairs -> a verdict in [0, 1] each, or the reason why there is none
Judge = Callable[[Sequence[tuple[Sample, str]]], "list[float | str]"]


@dataclass(frozen=True)
class Asking:
    """Everything but the question and its frame budget that shapes an answer and its score.

    `weights` is `folder_hash` of the model, `code` is `code_version()`. `besides` names what else shapes an
    answer where it is not the default: the engine, the judge. `upstream` has the prompt of a baseline.
    """

    episode: EpisodeConfig
    visual: VisualConfig
    reward: RewardConfig
    seed: int
    weights: str
    code: str
    besides: Mapping[str, str] = field(default_factory=dict)
    upstream: Upstream | None = None

    def key(self, sample: Sample, budget: int) -> str:
        """The hash under which the answer to `sample` at `budget` frames is kept.

        Of the video its name counts, which prompts may tell, and its content; not the folder that it lies in
        on this machine.
        """
        prompt = {} if self.upstream is None else {"prompt": self.upstream.fingerprint}
        return canonical_hash(
            dict(self.besides)
            | prompt
            | {
                "sample": sample.to_json() | {"video": video_name(sample.video)},
                "video": video_fingerprint(sample.video),
                "budget": budget,
                "episode": self.episode.model_dump(mode="json"),
                "visual": self.visual.model_dump(mode="json"),
                "reward": self.reward.model_dump(mode="json"),
                "seed": self.seed,
                "weights": self.weights,
                "code": self.code,
            }
        )


def agent_ask(engine: Engine, encoder: ChatEncoder, asking: Asking) -> Ask:
    """Questions asked by the agent, one episode each."""
    from paravt.agent import AgentSetup, run_episodes

    upstream = asking.upstream
    if upstream is not None:
        encoder = copy(encoder)  # the caller's keeps its own marks
        encoder.mark = upstream.family.mark

    def ask(samples: Sequence[Sample], budget: int) -> list[Rollout]:
        setup = AgentSetup(
            encoder, asking.episode, asking.visual, lambda sample: budget, asking.seed, upstream=upstream
        )
        return run_episodes(engine, samples, setup)

    return ask


def run(
    benchmark: Benchmark,
    samples: Sequence[Sample],
    budget: int,
    asking: Asking,
    ask: Ask,
    store: ResultStore,
    reporter: Reporter,
    chunk: int = CHUNK,
    judge: Judge | None = None,
    detail: bool = False,
) -> list[Result]:
    """One result per sample, in order. Raises ValueError if a sample occurs twice, EngineError if nothing can
    be asked any more (what was answered before is in the store).

    `ask(samples, budget)` answers with one Rollout per sample. What the store already holds is not asked.
    `judge` gives verdicts on open answers where `asking.reward` wants them. `detail` adds the fields that
    breakdowns, pairing and tool-use figures need.
    """
    if len({sample.id for sample in samples}) != len(samples):
        raise ValueError(f"benchmark {benchmark.name}: a sample id occurs twice; each question counts once")
    if (
        asking.reward.open_ended == "judge"
        and judge is None
        and any(s.question_type == "oe" for s in samples)
    ):
        raise ValueError("open answers are to be judged, but no judge is given; name one, or score by f1")
    video_fingerprint.cache_clear()  # a file may have been replaced since the last run
    results: list[Result] = []
    for start in range(0, len(samples), chunk):
        part = samples[start : start + chunk]
        keys = [asking.key(sample, budget) for sample in part]
        bases = [
            _base(benchmark, sample, key, budget, asking, detail)
            for sample, key in zip(part, keys, strict=True)
        ]
        done = [
            store.get(key) or _skipped(benchmark, part[i], bases[i], asking) for i, key in enumerate(keys)
        ]
        missing = [i for i, result in enumerate(done) if result is None]
        waiting = [i for i, result in enumerate(done) if result is not None and unjudged(result)]
        if missing:
            started = time.perf_counter()
            outcomes = _ask([part[i] for i in missing], budget, ask)
            verdicts = _verdicts([part[i] for i in missing], outcomes, asking.reward, judge)
            for i, outcome, verdict in zip(missing, outcomes, verdicts, strict=True):
                done[i] = _result(benchmark, part[i], bases[i], outcome, asking, verdict, detail)
            store.append([done[i] for i in missing])
            rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
            reporter.rollouts(rollouts, step=budget)
            seconds = (time.perf_counter() - started) / len(missing)
            reporter.metrics({f"evaluate/seconds_per_question_k{budget}": seconds}, step=start)
        if waiting and judge is not None:
            verdicts = judge([(part[i], done[i].answer) for i in waiting])
            for i, verdict in zip(waiting, verdicts, strict=True):
                done[i] = _judged_late(done[i], verdict)
            store.append([done[i] for i in waiting if not unjudged(done[i])])
        results += done
        reporter.progress(len(results), len(samples), f"{benchmark.name} at {budget} frames")
    return results


def _ask(samples: Sequence[Sample], budget: int, ask: Ask) -> list[Rollout | str]:
    """A rollout per sample, or the reason why there is none."""
    try:
        rollouts = ask(samples, budget)
    except EngineError:
        raise  # single requests are refused inside an episode; an error that comes up here is of the engine
    except QUESTION_ERRORS as error:
        if len(samples) == 1:
            return [f"{type(error).__name__}: {error}"]
        return [_ask([sample], budget, ask)[0] for sample in samples]
    if [rollout.sample_id for rollout in rollouts] != [sample.id for sample in samples]:
        raise TypeError(f"{len(samples)} questions were asked, and other ones were answered")
    return list(rollouts)


def _verdicts(
    samples: Sequence[Sample], outcomes: Sequence[Rollout | str], config: RewardConfig, judge: Judge | None
) -> list[float | str | None]:
    """The judge's word on each answer that is to be judged; None for the others."""
    found: list[float | str | None] = [None] * len(samples)
    if config.open_ended != "judge" or judge is None:
        return found
    places = [
        i
        for i, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True))
        if sample.question_type == "oe" and isinstance(outcome, Rollout) and readable(sample, outcome.answer)
    ]
    if places:
        verdicts = judge([(samples[i], outcomes[i].answer) for i in places])
        for i, verdict in zip(places, verdicts, strict=True):
            found[i] = verdict
    return found


def _judged_late(result: Result, verdict: float | str) -> Result:
    if isinstance(verdict, str):
        return replace(result, reason=UNJUDGED + verdict)
    return replace(result, status="answered", reason=None, score=verdict)


def _base(
    benchmark: Benchmark, sample: Sample, key: str, budget: int, asking: Asking, detail: bool
) -> dict[str, Any]:
    """The fields of a result that say what was asked."""
    base = {
        "key": key,
        "id": sample.id,
        "question_type": sample.question_type,
        "budget": budget,
        "temperature": asking.episode.temperature,
    }
    if detail:
        base["question"] = question_hash(sample)
        base["groups"] = {name: sample.meta[name] for name in benchmark.by if name in sample.meta}
    return base


def question_hash(sample: Sample) -> str:
    """The same in every run that asks the same question about the same file with the same gold answer."""
    asked = {key: sample.to_json()[key] for key in ("question", "options", "answer", "question_type")}
    return canonical_hash(asked | {"video": video_fingerprint(sample.video)})


def _skipped(benchmark: Benchmark, sample: Sample, base: dict[str, Any], asking: Asking) -> Result | None:
    reason = benchmark.skip(sample)
    if asking.upstream is not None and sample.question_type not in asking.upstream.family.kinds:
        reason = f"{asking.upstream.family.name} has no prompt for {sample.question_type} questions"
    return None if reason is None else Result(**base, status="skipped", reason=reason)


def _result(
    benchmark: Benchmark,
    sample: Sample,
    base: dict[str, Any],
    outcome: Rollout | str,
    asking: Asking,
    verdict: float | str | None,
    detail: bool,
) -> Result:
    if isinstance(outcome, str):
        return Result(**base, status="failed", reason=outcome)
    if outcome.stop_reason == "failed":
        return Result(**base, status="failed", reason=outcome.error or "the episode gave no reason")
    reward = score(outcome, sample, asking.reward, verdict if isinstance(verdict, float) else None)
    formed = asking.episode.mode != "direct"  # which asks for an answer at once: it has no format to keep
    episode = {
        "answer": outcome.answer,
        "stop_reason": outcome.stop_reason,
        "compliant": outcome.compliant if formed else None,
        "format": reward.format if formed else None,
        "calls": outcome.call_count,
        "frames_seen": outcome.frames_seen,
    }
    if detail:
        episode["tools"] = tool_counts(outcome)
    if not readable(sample, outcome.answer):
        said = (outcome.answer or "")[:80]
        words = (
            "no answer" if outcome.answer is None else f"{said!r} names no {_WANTED[sample.question_type]}"
        )
        return Result(**base, **episode, status="unparsed", reason=words, score=0.0)
    if isinstance(verdict, str):
        return Result(**base, **episode, status="failed", reason=UNJUDGED + verdict)
    value = benchmark.metric(sample, outcome, reward)
    if value is None:
        why = next((words for words in reward.reasons if words.startswith("accuracy")), "it has no score")
        return Result(**base, **episode, status="failed", reason=f"not scored, {why}")
    return Result(**base, **episode, status="answered", score=float(value))


_WANTED = {"mcq": "option", "tvg": "span of time", "oe": "text"}


def tool_counts(rollout: Rollout) -> dict[str, int]:
    """Turns, and calls by status, of an episode; what did not occur is left out."""
    found = Counter(execution.status for execution in rollout.executions)
    found["clamped"] = sum(execution.clamped for execution in rollout.executions)
    found["forced"] = sum(turn.forced_answer for turn in rollout.turns)
    return {"turns": len(rollout.turns)} | {name: found[name] for name in sorted(found) if found[name]}


def readable(sample: Sample, answer: str | None) -> bool:
    """Whether the one reader of the question's type gets an answer out of the text."""
    if answer is None:
        return False
    if sample.question_type == "mcq":
        return read_choice(answer, sample.options) is not None
    if sample.question_type == "tvg":
        return read_span(answer) is not None
    return bool(read_open(answer))


@lru_cache(maxsize=100_000)
def video_fingerprint(video: str) -> str:
    """Size, first and last MiB of the file, hashed; "missing" if there is none. Read once per run."""
    path = next((Path(path) for path in file_paths(on_this_machine(video)) if Path(path).is_file()), None)
    if path is None:
        return "missing"
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(EDGE_BYTES))
        if size > EDGE_BYTES:
            file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:32]


def folder_hash(folder: str | Path) -> str:
    """A hash of a model folder's weights, configuration and tokenizer: what it answers depends on these."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".safetensors", ".json", ".txt", ".jinja"):
            digest.update(path.name.encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def code_version() -> str:
    """A hash of the source that shapes a prompt, an episode or a score; equal code, equal hash."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name in SHAPING:
        for path in sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]:
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]
