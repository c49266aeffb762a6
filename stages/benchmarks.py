"""The published splits inside `evaluate`: asked greedily at one frame budget, from the tables in data/hub.

Writes one result a question and a summary per split to a folder that the stage publishes with its own files.
Answers are kept in .scratch/evaluate/NAME-benchmarks as they come; a run that was stopped goes on from there.
"""

from __future__ import annotations

from pathlib import Path
import shutil
from typing import Any

from paravt.benchmarks import Place
from paravt.benchmarks.results import Result
from paravt.benchmarks.runner import Asking, code_version, folder_hash
from paravt.benchmarks.session import Plan, evaluate
from paravt.config import UPSTREAM, EngineConfig, Params, RewardConfig, VLLMEngineConfig
from paravt.data.media import media_root
from paravt.data.published import PROMPTS
from paravt.judge import judge_of
from paravt.local import open_model
from paravt.protocol.families import load as load_prompt
from paravt.reporter import Reporter

TABLES, VERDICTS = Path("data/hub"), Path(".scratch/judge")


def evaluate_published(
    params: Params, model: Path, home: Path, reporter: Reporter, installed: str
) -> dict[str, tuple[list[Result], dict[str, Any]]]:
    """Results and figures of each of evaluate.benchmarks; all files are in `home`.

    `installed` names the environment, which shapes answers too.
    """
    from paravt.engines.limits import PromptLimits
    from paravt.model import load_encoder

    config = params.evaluate
    mode = config.benchmark_mode or params.episode.mode
    upstream = load_prompt(mode, TABLES / PROMPTS) if mode.startswith(UPSTREAM) else None
    changes = {"mode": mode} if upstream is None else upstream.family.episode
    episode = params.episode.model_copy(update=changes | {"temperature": 0.0})
    weights, code = folder_hash(model), f"{code_version()}-{installed}"
    for path in home.glob("*.json*"):  # of other weights or other splits; the answers lie below
        path.unlink()
    scoring = RewardConfig(open_ended=params.reward.open_ended, judge_model=params.reward.judge_model)
    judge = judge_of(scoring, VERDICTS)
    besides = {"engine": engine_of(params.engine)} | ({"judge": judge.identity} if judge else {})
    asking = Asking(episode, params.visual, scoring, params.seed, weights, code, besides, upstream)
    tokenizer = load_encoder(model, params.visual).tokenizer
    place = Place(
        tables=TABLES,
        media=media_root(),
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    limits = PromptLimits.of(episode, params.visual, config.benchmark_budget)
    plan = Plan(tuple(config.benchmarks), config.benchmark_budget, home, place, config.benchmark_questions)
    who = {"model": model.name}
    return evaluate(
        plan, asking, lambda: open_model(model, params.visual, params.engine, limits), reporter, who, judge
    )


def engine_of(config: EngineConfig) -> str:
    """Name and number format of what answers on this machine: it is part of what an answer is kept for."""
    import torch

    if isinstance(config, VLLMEngineConfig):
        return f"{config.name} {config.dtype}"
    return f"{config.name} {config.precision('cuda' if torch.cuda.is_available() else None)}"


def copy_results(home: Path, target: Path) -> None:
    """The results and the summary, without answers and locks."""
    target.mkdir()
    for path in sorted(home.glob("*.json*")):
        shutil.copyfile(path, target / path.name)
