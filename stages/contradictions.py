"""Values of params.yaml that are fine alone and wrong together, or that name what nobody knows.

Each is found before anything runs, and is one sentence that says what to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import difflib
from inspect import signature
from math import ceil
from pathlib import Path

from paravt.benchmarks import PUBLISHED
from paravt.config import NeedlesConfig, Params
from paravt.data.needles import COLOURS, MARGIN_S, make_scene
from paravt.data.published import SFT_SPLITS, SOURCES
from paravt.protocol.families import FAMILIES, NOT_SUPPORTED

METHODS = Path(__file__).resolve().parent.parent / "conf" / "method"
SMALLEST_BUDGET: int = signature(make_scene).parameters["smallest_budget"].default


def contradictions(params: Params) -> Iterator[str]:
    """A sentence for each."""
    visual = params.visual
    if visual.min_pixels > visual.max_pixels:
        low, high = visual.min_pixels, visual.max_pixels
        yield f"visual.min_pixels {low} is above visual.max_pixels; write {high} or less"
    yield from _needles(params.data.needles, params.budget.choices)
    yield from _counts(params)
    yield from _hub(params)
    yield from _evaluation(params)
    yield from _training(params)
    names = sorted(path.stem for path in METHODS.glob("*.yaml"))
    if names:
        yield from _unknown("method", [params.method], names)


def closest(word: str, known: Sequence[str]) -> str:
    """` (did you mean WORD?)`, empty if no known word is near."""
    match = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {match[0]}?)" if match else ""


def _unknown(name: str, values: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    for value in values:
        if value not in known:
            yield f"{name} {value!r} is not known{closest(value, known)}; write one of {', '.join(known)}"


def _repeated(values: Sequence[float | str]) -> bool:
    return len(set(values)) < len(values)


def _needles(needles: NeedlesConfig, choices: Sequence[int]) -> Iterator[str]:
    """What paravt.data.needles cannot draw, or what its traces cannot be written from."""
    for name in ("part_s", "needle_s"):
        low, high = getattr(needles, name)
        if not 0 < low <= high:
            yield f"data.needles.{name} is [{low}, {high}]; write [shortest, longest] seconds, as [2.0, 3.0]"
    frame_s = 1 / needles.fps
    if needles.needle_s[0] < frame_s:
        yield (
            f"data.needles.needle_s may be {needles.needle_s[0]:g} s, less than a frame at data.needles.fps "
            f"{needles.fps}; write {frame_s:g} or more"
        )
    # lengths are rounded to frames, the needle's perhaps up and its part's down
    least_s = needles.needle_s[1] + 2 * MARGIN_S + frame_s
    if least_s > needles.part_s[0]:
        yield (
            f"data.needles.needle_s reaches {needles.needle_s[1]:g} s, and a part of {needles.part_s[0]:g} s "
            f"has no room for it between margins of {MARGIN_S:g} s; write data.needles.part_s from "
            f"{least_s:g} s on, or a shorter needle_s"
        )
    if needles.size % 2:
        yield f"data.needles.size is {needles.size}, and H.264 needs an even one; write {needles.size + 1}"
    most = min(len(COLOURS), SMALLEST_BUDGET)
    if needles.parts > most:
        yield (
            f"data.needles.parts is {needles.parts}, but there are {len(COLOURS)} colours, and an overview "
            f"of {SMALLEST_BUDGET} frames has to show each part; write {most} or less"
        )
    shortest, longest = (max(1, round(length_s * needles.fps)) for length_s in needles.part_s)
    # so many frames are nowhere further apart than the shortest part is long
    sure = 2 + ceil(((needles.parts - 1) * longest - 1) / shortest)
    # scenes are drawn until SMALLEST_BUDGET frames show each part
    missing = [k for k in choices if k < SMALLEST_BUDGET or SMALLEST_BUDGET < k < sure]
    if missing:
        more = f", or {sure} or more" if sure > SMALLEST_BUDGET + 1 else " or more"
        yield (
            f"budget.choices has {min(missing)}, and an overview of so few frames may miss one of "
            f"{needles.parts} parts of {needles.part_s[0]:g} to {needles.part_s[1]:g} s; write "
            f"{SMALLEST_BUDGET}{more}"
        )


def _counts(params: Params) -> Iterator[str]:
    needles = params.data.needles
    wanted = {
        "sft.batch_size": (params.sft.batch_size, "data.needles.sft_count", needles.sft_count),
        "grpo.prompts_per_step": (params.grpo.prompts_per_step, "data.needles.rl_count", needles.rl_count),
        "evaluate.questions_per_budget": (
            params.evaluate.questions_per_budget,
            "data.needles.eval_count",
            needles.eval_count,
        ),
        "evaluate.format_questions": (
            params.evaluate.format_questions,
            "data.needles.eval_count",
            needles.eval_count,
        ),
    }
    if params.data.hub is not None:  # the needles give evaluation questions only
        del wanted["sft.batch_size"], wanted["grpo.prompts_per_step"]
    for name, (value, of, count) in wanted.items():
        if value > count:
            yield f"{name} is {value}, but {of} makes only {count}; write {count} or less"


def _hub(params: Params) -> Iterator[str]:
    hub = params.data.hub
    if hub is None:
        return
    for name in hub.prompts:
        if name in NOT_SUPPORTED:
            yield f"data.hub.prompts cannot bring {name}: {NOT_SUPPORTED[name]}; leave it out"
    yield from _unknown("data.hub.prompts", hub.prompts, list(FAMILIES))
    yield from _unknown("data.hub.sft_splits", hub.sft_splits, SFT_SPLITS)
    yield from _unknown("data.hub.revisions", hub.revisions, list(SOURCES))


def _evaluation(params: Params) -> Iterator[str]:
    config = params.evaluate
    if not config.budgets or min(config.budgets) < 1 or _repeated(config.budgets):
        yield "evaluate.budgets must be distinct positive frame counts; write for example [4, 8, 16]"
    if any(value <= 0 for value in config.format_temperatures) or _repeated(config.format_temperatures):
        yield (
            "evaluate.format_temperatures must be distinct and above 0, greedy answers are asked for anyway; "
            "write for example [0.7, 1.0]"
        )
    yield from _unknown("evaluate.benchmarks", config.benchmarks, PUBLISHED)
    if _repeated(config.benchmarks):
        yield "evaluate.benchmarks names a split twice; write each once"
    rows = params.data.hub.benchmark_rows if params.data.hub else None
    if config.benchmarks and rows is not None:
        yield (
            f"data.hub.benchmark_rows brings videos of {rows} rows, but evaluate.benchmarks asks about all; "
            "write null there, and the number in evaluate.benchmark_questions"
        )
    fetched = params.data.hub.benchmarks if params.data.hub else []
    for name in config.benchmarks:
        # videomme_wsub asks about the data of videomme
        data = next((source for source in SOURCES if name == source or name.startswith(f"{source}_")), name)
        if data not in fetched:
            where = (
                "add it to data.hub.benchmarks"
                if params.data.hub
                else "write data.hub, as scale=paravt_8b has"
            )
            yield f"evaluate.benchmarks asks {name}, but the data of {data} is not brought; {where}"


def _training(params: Params) -> Iterator[str]:
    engine = params.engine
    if params.episode.temperature == 0:
        yield (
            "episode.temperature is 0, but a group of greedy episodes has no spread to learn from; write 0.7 "
            "or 1.0"
        )
    if engine.name == "vllm" and params.grpo.group_size > engine.max_sequences:
        yield (
            f"grpo.group_size is {params.grpo.group_size}, but a server decodes engine.max_sequences "
            f"{engine.max_sequences} at a time; write {params.grpo.group_size} or more there"
        )
    if params.anchoring.scope == "off" and params.anchoring.weight > 0:
        yield "anchoring.weight has no effect with scope off; write 0.0, or choose a scope"
