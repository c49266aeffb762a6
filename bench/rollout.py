"""Episodes per second: vLLM servers, one request at a time, and the transformers engine, on the same seeds.

    python -m bench.rollout [--model models/tiny-base] [--samples 8] [--group 8] [--rounds 3]

    vllm               all requests of a round of episodes in flight together
    vllm, one by one   the same server, one continuation after the other
    transformers       the batched engine of this process
    five windows       five sub-agents in flight together against one alone, on the vLLM server

Each way runs the same episodes once to warm up, then `rounds` times, in turn, so that other load on the
machine falls on all of them; the median counts. Draws differ between the engines, so episodes per second are
told beside tokens per second. Prints the ratios and writes them to --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import json
import os
from pathlib import Path
import statistics
import sys
import tempfile
import time

from paravt.agent import AgentSetup, run_episodes
from paravt.chat import ChatEncoder
from paravt.config import Params
from paravt.data.needles import make_split
from paravt.engines import Engine, Generation, Request, Sampling, TransformersEngine
from paravt.engines.factory import make_engine
from paravt.engines.limits import PromptLimits
from paravt.model import load_encoder, load_model
from paravt.prompting import subagent_prompt
from paravt.rollout import Rollout, Sample
from paravt.video import open_video
from stages.params import check, compose

FRAMES = 8
WINDOWS = 5


class OneByOne:
    """The engine, asked for one continuation after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        answers = []
        for request in requests:
            sampling = request.sampling
            alone = [
                Request(
                    request.ids,
                    request.visuals,
                    Sampling(sampling.temperature, sampling.max_new_tokens, sampling.seed + index),
                )
                for index in range(sampling.n)
            ]
            answers.append([self.engine.generate([single])[0][0] for single in alone])
        return answers


def timed(work: Callable[[], list[Rollout]]) -> tuple[float, int, int]:
    """Seconds, episodes and sampled tokens of one round."""
    started = time.perf_counter()
    rollouts = work()
    seconds = time.perf_counter() - started
    failed = [rollout.error for rollout in rollouts if rollout.stop_reason == "failed"]
    if failed:
        raise RuntimeError(f"an episode failed: {failed[0]}")
    tokens = sum(rollout.tokens_written for rollout in rollouts)
    return seconds, len(rollouts), tokens


def compare(
    engines: dict[str, Engine], samples: Sequence[Sample], agent: Callable[[], AgentSetup], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians by engine, all run in turn."""
    measured: dict[str, list[tuple[float, int, int]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            figures = timed(lambda engine=engine: run_episodes(engine, samples, agent()))
            if number:  # the first round warms up
                measured[name].append(figures)
            print(f"  {name}: {figures[0]:.1f} s, {figures[1]} episodes, {figures[2]} tokens", flush=True)
    return {
        name: {
            "episodes_per_s": statistics.median(episodes / s for s, episodes, _ in figures),
            "tokens_per_s": statistics.median(tokens / s for s, _, tokens in figures),
            "seconds": statistics.median(s for s, _, _ in figures),
        }
        for name, figures in measured.items()
    }


def five_windows(
    engine: Engine, encoder: ChatEncoder, params: Params, sample: Sample, rounds: int
) -> dict[str, float]:
    """Seconds of five windows together and of one alone, each writing the same number of tokens."""
    requests = []
    with open_video(sample.video) as video:
        step_s = video.duration_s / WINDOWS
        for number in range(WINDOWS):
            window_s = (number * step_s, (number + 1) * step_s)
            frames = video.crop(*window_s)
            prompt = subagent_prompt(encoder, sample, frames, window_s, params.episode)
            limit = params.episode.subagent.max_new_tokens
            requests.append(Request(tuple(prompt.ids), tuple(prompt.visuals), Sampling(1.0, limit, number)))
    together, alone = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        engine.generate(requests)
        middle = time.perf_counter()
        for request in requests:
            engine.generate([request])
        if number:
            together.append(middle - started)
            alone.append((time.perf_counter() - middle) / WINDOWS)
    five_s, one_s = statistics.median(together), statistics.median(alone)
    return {"five_s": five_s, "one_s": one_s, "ratio": five_s / one_s}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/tiny-base"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/rollout.json"))
    options = parser.parse_args()

    params = check(compose(["engine=vllm"]))
    encoder = load_encoder(options.model, params.visual)
    limits = PromptLimits.of(params.episode, params.visual, FRAMES)

    def agent() -> AgentSetup:
        return AgentSetup(encoder, params.episode, params.visual, lambda sample: FRAMES, 1, options.group)

    with tempfile.TemporaryDirectory() as holder:
        folder = Path(holder)
        samples, _ = make_split(params.data.needles, 1, "eval", options.samples, folder, f"{folder}/")
        local = TransformersEngine(load_model(options.model), encoder.end_ids)
        started = time.perf_counter()
        with make_engine(params.engine, options.model, encoder, limits) as served:
            start_s = time.perf_counter() - started
            print(f"server ready after {start_s:.0f} s; load {os.getloadavg()[0]:.1f}", flush=True)
            engines = {"vllm": served, "vllm, one by one": OneByOne(served), "transformers": local}
            speeds = compare(engines, samples, agent, options.rounds)
            windows = five_windows(served, encoder, params, samples[0], max(5, options.rounds))
    fast = speeds["vllm"]["tokens_per_s"]
    result = {
        "model": str(options.model),
        "episodes": options.samples * options.group,
        "rounds": options.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "server_start_s": start_s,
        "speeds": speeds,
        "vllm_over_one_by_one": fast / speeds["vllm, one by one"]["tokens_per_s"],
        "vllm_over_transformers": fast / speeds["transformers"]["tokens_per_s"],
        "five_windows": windows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, figures in speeds.items():
        print(f"{name}: {figures['episodes_per_s']:.2f} episodes/s, {figures['tokens_per_s']:.0f} tokens/s")
    print(f"vllm against one by one: {result['vllm_over_one_by_one']:.1f} x (tokens per second)")
    print(f"vllm against transformers: {result['vllm_over_transformers']:.2f} x")
    print(f"five windows against one: {windows['ratio']:.2f} x the time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
