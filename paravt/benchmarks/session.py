"""One evaluation from a list of benchmarks to a folder of results.

    OUT/answers/PART.jsonl    answers as they come, by key; append-only; PART is `all` or `2-of-8`
    OUT/NAME.jsonl            one result a question, in table order
    OUT/summary.json          per benchmark: what was asked, and all figures

Parts take every n-th question and write answers only, each its own file, on one machine or on several that
share OUT. A run without a part finds all answers, asks what is still missing (failures, too), and writes the
rest: the same bytes as if there had been no parts. A model is opened when a question needs it, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paravt.benchmarks.breakdown import describe
from paravt.benchmarks.registry import Place, get
from paravt.benchmarks.results import Result, ResultStore, read_results, write_results
from paravt.benchmarks.runner import Ask, Asking, Judge, agent_ask, run
from paravt.hashing import stable_hash
from paravt.reporter import Reporter
from paravt.rollout import Rollout, Sample

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.engines import Engine

OpenEngine = Callable[[], "AbstractContextManager[tuple[Engine, ChatEncoder]]"]


class SessionError(ValueError):
    """An evaluation that cannot be done as asked; the message says what to change."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated. `limit` questions of each benchmark; `part` is (index from 0, number of parts)."""

    names: tuple[str, ...]
    budget: int
    out: Path
    place: Place
    limit: int | None = None
    part: tuple[int, int] = (0, 1)
    chunk: int = 64

    @property
    def whole(self) -> bool:
        return self.part[1] == 1

    @property
    def answers(self) -> Path:
        name = "all" if self.whole else f"{self.part[0] + 1}-of-{self.part[1]}"
        return self.out / "answers" / f"{name}.jsonl"


def evaluate(
    plan: Plan,
    asking: Asking,
    open_engine: OpenEngine,
    reporter: Reporter,
    who: Mapping[str, Any],
    judge: Judge | None = None,
) -> dict[str, tuple[list[Result], dict[str, Any]]]:
    """Results and figures of each benchmark, as they are written to `plan.out`.

    `who` says in the summary which model was asked; the rest follows from `plan` and `asking`. Raises
    SessionError if another run writes the same answers, FileNotFoundError for a table that is not there,
    EngineError if the engine is lost: answers are kept.
    """
    loaded = {name: get(name).load(plan.place) for name in plan.names}
    found: dict[str, tuple[list[Result], dict[str, Any]]] = {}
    with _alone(plan.answers), ExitStack() as stack:
        others = sorted(set(plan.answers.parent.glob("*.jsonl")) - {plan.answers})
        store = ResultStore(plan.answers, others)
        ask = _opened_when_needed(open_engine, asking, stack)
        for name, questions in loaded.items():
            samples = chosen(questions.samples, plan.limit)[plan.part[0] :: plan.part[1]]
            results = run(
                get(name), samples, plan.budget, asking, ask, store, reporter, plan.chunk, judge, detail=True
            )
            found[name] = results, describe(get(name), results, questions)
            if plan.whole:
                _write(plan.out, name, results, {"asked": {**who, **told(plan, asking)}} | found[name][1])
    return found


def told(plan: Plan, asking: Asking) -> dict[str, Any]:
    """What the summary says of a run, beside which model was asked."""
    leaves_out = plan.place.open_ended == "leave_out"
    facts = {
        "weights": asking.weights,
        "engine": asking.besides.get("engine", "transformers"),
        "overview_frames": plan.budget,
        "episode": asking.episode.model_dump(mode="json"),
        "visual": asking.visual.model_dump(mode="json"),
        "open_ended": "leave_out" if leaves_out else asking.reward.open_ended,
        "subtitle_tokens": plan.place.subtitle_tokens,
        "seed": asking.seed,
        "limit": plan.limit,
        "code": asking.code,
    }
    facts |= {"upstream": asking.upstream.told} if asking.upstream else {}
    return facts | ({"judge": asking.besides["judge"]} if "judge" in asking.besides else {})


def chosen(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """`limit` of the samples, in their order: those of the smallest hash of their id. Tables are sorted by
    length or kind, so the first ones would be of one sort; a larger limit keeps what a smaller one chose.
    """
    if limit is None or limit >= len(samples):
        return list(samples)
    ranked = sorted(range(len(samples)), key=lambda place: (stable_hash("limit", samples[place].id), place))
    return [samples[place] for place in sorted(ranked[:limit])]


def _opened_when_needed(open_engine: OpenEngine, asking: Asking, stack: ExitStack) -> Ask:
    opened: list[Ask] = []

    def ask(samples: Sequence[Sample], budget: int) -> list[Rollout]:
        if not opened:
            engine, encoder = stack.enter_context(open_engine())
            opened.append(agent_ask(engine, encoder, asking))
        return opened[0](samples, budget)

    return ask


@contextmanager
def _alone(answers: Path) -> Iterator[None]:
    """The only run that writes these answers. The lock goes with the process, however that ends."""
    answers.parent.mkdir(parents=True, exist_ok=True)
    with open(answers.with_suffix(".lock"), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionError(
                f"another run is writing {answers}; wait for it, take another part, or another --out"
            ) from None
        yield


def _write(out: Path, name: str, results: Sequence[Result], figures: dict[str, Any]) -> None:
    """Both files, each renamed into place; other benchmarks of the summary are kept."""
    aside = out / f".{name}.writing"
    write_results(aside, results)
    aside.replace(out / f"{name}.jsonl")
    summary = read_summary(out) if (out / "summary.json").is_file() else {}
    summary[name] = figures
    aside.write_text(
        json.dumps(dict(sorted(summary.items())), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    aside.replace(out / "summary.json")


def read_summary(out: Path) -> dict[str, Any]:
    """The figures of a folder by benchmark. Raises SessionError where there are none."""
    path = out / "summary.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SessionError(f"{out} holds no summary.json; give a folder that `paravt eval` wrote") from None
    except ValueError as error:
        raise SessionError(f"{path} is not JSON; run the evaluation again, its answers are kept") from error
    return data


def read_folder(out: Path) -> dict[str, list[Result]]:
    """The results of a folder by benchmark."""
    return {name: read_results(out / f"{name}.jsonl") for name in read_summary(out)}
