"""What `paravt eval` asks, and whom: from its arguments to a plan, a prompt, an engine, a judge."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
import os
from pathlib import Path
import re
from typing import TYPE_CHECKING, Any

from paravt.commands.shared import UsageError, servers, settings
from paravt.config import UPSTREAM, EndpointConfig, EpisodeConfig, RewardConfig, VisualConfig

if TYPE_CHECKING:
    from paravt.benchmarks import Place
    from paravt.benchmarks.runner import Asking
    from paravt.benchmarks.session import OpenEngine, Plan
    from paravt.chat import ChatEncoder
    from paravt.judge import Judge
    from paravt.protocol.upstream import Upstream

RESULTS, TOKENIZER = Path("reports/eval"), Path("models/tiny-base")
NO_TOKENS = (
    "the endpoint speaks text: prompts are rendered by its own chat template, token ids are the local "
    "tokenizer's, log-probs are absent"
)


def prepare(options: argparse.Namespace) -> tuple[Plan, Asking, OpenEngine, dict[str, Any], Judge | None]:
    """The plan, what shapes each question, the engine, which model that is, the judge.

    Raises UsageError for arguments that do not go together.
    """
    from paravt.benchmarks import get
    from paravt.benchmarks.runner import Asking, code_version
    from paravt.benchmarks.session import Plan

    if bool(options.model) == bool(options.endpoint):
        raise UsageError("give either --model DIR or --endpoint URL")
    if not options.benchmarks:
        raise UsageError("give --benchmarks, for example --benchmarks videomme,lvbench")
    names = tuple(get(name).name for name in dict.fromkeys(options.benchmarks))
    if options.endpoint and not options.prefill:
        options.force_think = False
    upstream = _upstream(options)
    visual, episode, budget = settings(options)
    if upstream is None and episode.mode.startswith(UPSTREAM):
        raise UsageError(f"episode.mode is {episode.mode}; a baseline's prompt is chosen by --mode")
    reward = RewardConfig(open_ended="f1" if options.open_ended == "leave_out" else options.open_ended)
    judge = _judge(options, reward)
    besides = {} if judge is None else {"judge": judge.identity}
    if options.endpoint:
        open_engine, weights, who = _endpoint(options, visual)
        besides["engine"] = "openai"
        model = who["endpoint"]["model"]
    else:
        open_engine, weights = _model(options, visual, episode, budget)
        who, model = {"model": str(options.model)}, options.model.resolve().name
        if options.engine != "transformers":
            besides["engine"] = options.engine
    asking = Asking(episode, visual, reward, options.seed, weights, code_version(), besides, upstream)
    place = _place(options, visual, names)
    out = options.out or RESULTS / re.sub(r"[^\w.-]+", "_", model)
    plan = Plan(names, budget, out, place, options.limit, options.part, options.chunk)
    return plan, asking, open_engine, who, judge


def _upstream(options: argparse.Namespace) -> Upstream | None:
    """The prompt of a published baseline; its rounds, calls and results hold where nothing else was given."""
    if not (options.mode or "").startswith(UPSTREAM):
        return None
    from paravt.protocol.families import load

    upstream = load(options.mode, options.prompts)
    for name, value in upstream.family.episode.items():
        if name != "dispatch" or options.dispatch is None:
            setattr(options, name, value)
    return upstream


def _model(
    options: argparse.Namespace, visual: VisualConfig, episode: EpisodeConfig, budget: int
) -> tuple[OpenEngine, str]:
    from paravt.benchmarks.runner import folder_hash
    from paravt.local import open_model
    from paravt.model import check_folder

    check_folder(options.model)
    served = servers(options, visual, episode, budget) if options.engine == "vllm" else ()
    return lambda: open_model(options.model, visual, *served), folder_hash(options.model)


def _endpoint(options: argparse.Namespace, visual: VisualConfig) -> tuple[OpenEngine, str, dict[str, Any]]:
    from paravt.engines.openai import KEY, OpenAIEngine

    config = EndpointConfig(
        url=options.endpoint,
        model=options.endpoint_model,
        in_flight=options.in_flight,
        timeout_s=options.timeout,
        prefill=options.prefill,
    )
    encoder = _text_encoder(options, visual)
    engine = OpenAIEngine(config, encoder, os.environ.get(KEY, ""))

    @contextmanager
    def open_endpoint() -> Iterator[tuple[OpenAIEngine, ChatEncoder]]:
        yield engine, encoder

    who = {"endpoint": {"url": engine.client.url, "model": engine.model, "note": NO_TOKENS}}
    return open_endpoint, f"{engine.client.url} {engine.model}", who


def _text_encoder(options: argparse.Namespace, visual: VisualConfig) -> ChatEncoder:
    """The tokenizer that keeps the books of an endpoint, or counts the tokens of subtitles."""
    from transformers import AutoTokenizer

    from paravt.chat import ChatEncoder

    folder = options.tokenizer or options.model or TOKENIZER
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"{folder} holds no tokenizer.json; give --tokenizer, the folder of a Qwen3-VL model"
        )
    return ChatEncoder(AutoTokenizer.from_pretrained(folder, local_files_only=True), visual)


def _judge(options: argparse.Namespace, reward: RewardConfig) -> Judge | None:
    if reward.open_ended != "judge":
        return None
    from paravt.judge import KEY, Judge

    if not options.judge or not options.judge_model:
        raise UsageError("--open-ended judge needs --judge URL and --judge-model NAME")
    config = EndpointConfig(url=options.judge, model=options.judge_model, in_flight=options.in_flight)
    return Judge(config, options.verdicts, os.environ.get(KEY, ""))


def _place(options: argparse.Namespace, visual: VisualConfig, names: Sequence[str]) -> Place:
    from paravt.benchmarks import Place
    from paravt.data.media import media_root

    place = Place(
        tables=options.tables,
        media=options.media or media_root(),
        needles=options.needles,
        open_ended="leave_out" if options.open_ended == "leave_out" else "score",
        subtitle_tokens=options.subtitle_tokens,
    )
    if "videomme_wsub" not in names:
        return place
    if options.endpoint and not options.tokenizer:
        raise UsageError("subtitles are counted in the model's tokens: give --tokenizer, a folder with it")
    tokenizer = _text_encoder(options, visual).tokenizer
    return replace(place, count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
