"""A GRPO step of this project against one of TRL's GRPOTrainer: trained tokens per second, peak memory.

    make setup-bench
    python -m bench.grpo_step [--model models/tiny-base] [--steps 6] [--rounds 3] [--out bench/grpo_step.json]

Both train the same Qwen3-VL on the same prompts and frames (TRL's prompt ids are compared with ours): groups
of 8, the same limit of new tokens, temperature 1, float32, frozen vision tower, KL to a frozen start, AdamW,
one thread. TRL has no sub-agents, so episodes are of one turn here. A trained token is a sampled one that
carries loss. Each side is a process of its own, in turn, `rounds` times; two steps of each warm up.

TRL runs twice: with all completions in one backward pass, and with one group per pass; the better one counts
for each figure. Memory: the most that the process held, and how much of it came after its model was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from PIL import Image
import torch

from paravt.chat import encode_frames
from paravt.config import OptimiserConfig, Params
from paravt.data.needles import make_split
from paravt.engines import TransformersEngine
from paravt.grpo import GRPOSetup, train
from paravt.model import load_encoder, load_model
from paravt.prompting import main_prompt
from paravt.protocol.prompts import question_text, system_prompt
from paravt.rewards import Reward
from paravt.rewards.format import episode_sites
from paravt.rollout import Rollout, Sample, read_samples, write_jsonl
from paravt.video import open_video
from stages.params import ROOT, check, compose

PROMPTS, GROUP, FRAMES, NEW_TOKENS = 4, 8, 8, 120
WARM_UP = 2
LEARNING_RATE = 1e-9  # the weights stay, so that each round writes episodes alike
ALONE = ("--side", "ours")


def settings() -> Params:
    """The default method, but for one turn that begins with nothing written before it."""
    params = check(compose(["method=para_grpo"]))
    episode = {"max_turns": 0, "force_think": False, "max_new_tokens": NEW_TOKENS}
    budget = {"choices": [FRAMES]}
    return params.model_copy(
        update={
            "episode": params.episode.model_copy(update=episode),
            "budget": params.budget.model_copy(update=budget),
        }
    )


def reward(rollout: Rollout, sample: Sample) -> Reward:
    """By length: it spreads within any group. TRL's side has the same."""
    text = "".join(turn.text for turn in rollout.turns)
    total = len(text) / 100
    return Reward(total, 0.0, 0.0, episode_sites(rollout), total)


class Kept:
    """A reporter that keeps what steps took."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.steps.append(dict(values))

    def rollouts(self, rollouts: list[Rollout], step: int) -> None: ...

    def progress(self, done: int, total: int, note: str = "") -> None: ...


def ours(folder: Path) -> dict[str, Any]:
    """Our side, in this process."""
    work = json.loads((folder / "work.json").read_text())
    torch.set_num_threads(work["threads"])
    params = settings()
    encoder, model = load_encoder(work["model"], params.visual), load_model(work["model"])
    optimiser = OptimiserConfig(learning_rate=work["learning_rate"])
    few = {"steps": work["steps"], "save_every": work["steps"], "optimiser": optimiser}
    few |= {"prompts_per_step": work["prompts"], "group_size": work["group"]}
    few |= {"micro_batch_tokens": work["micro_batch_tokens"]}
    setup = GRPOSetup.of(params.model_copy(update={"grpo": params.grpo.model_copy(update=few)}))
    samples = read_samples(folder / "samples.jsonl")
    kept, before = Kept(), rss_gib()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        train(
            model,
            None,
            TransformersEngine(model, encoder.end_ids),
            encoder,
            samples,
            setup,
            kept,
            scratch,
            reward,
        )
    return {
        "seconds": [step["time/step_s"] for step in kept.steps],
        "tokens": [step["loss_tokens"] for step in kept.steps],
        "rollout_s": [step["time/rollout_s"] for step in kept.steps],
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "before_gib": before,
    }


def rss_gib() -> float:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def items(params: Params, model: Path, samples: list[Sample], folder: Path) -> list[dict[str, Any]]:
    """The prompts for the other side: texts and the names of frames in turn, and our token ids."""
    encoder = load_encoder(model, params.visual)
    found = []
    for number, sample in enumerate(samples):
        with open_video(sample.video) as video:
            frames = video.sample(FRAMES)
        parts: list[str | None] = []
        names = []
        for place, visual in enumerate(encode_frames(frames, sample.video, params.visual)):
            names.append(f"{number}-{place}.png")
            Image.fromarray(visual.image).save(folder / names[-1])
            parts += [f"<{visual.time_s:.1f} seconds>", None]
        parts.append(question_text(sample, params.episode.mode))
        prompt = main_prompt(encoder, sample, frames, params.episode)
        system = system_prompt(params.episode.mode, params.episode.calls_per_turn)
        found.append({"system": system, "parts": parts, "frames": names, "ids": list(prompt.ids)})
    return found


def run(side: str, folder: Path, work: dict[str, Any], python: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    (folder / "work.json").write_text(json.dumps(work))
    words = [sys.executable, "-m", "bench.grpo_step", *ALONE, str(folder)]
    if side != "ours":
        words = [str(python), str(ROOT / "bench/grpo_trl.py"), str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": str(work["threads"]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed: {done.stderr[-3000:]}")
    return json.loads((folder / ("ours.json" if side == "ours" else "trl.json")).read_text())


def figures(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds, each over its steps after warming up."""

    def median(of) -> float:
        return statistics.median(of(one) for one in rounds)

    def tail(one: dict[str, Any], name: str) -> float:
        return sum(one[name][WARM_UP:])

    return {
        "trained_tokens_per_s": median(lambda one: tail(one, "tokens") / tail(one, "seconds")),
        "step_s": median(lambda one: statistics.mean(one["seconds"][WARM_UP:])),
        "rollout_s": median(lambda one: statistics.mean(one["rollout_s"][WARM_UP:])),
        "tokens_per_step": median(lambda one: statistics.mean(one["tokens"][WARM_UP:])),
        "peak_gib": median(lambda one: one["peak_gib"]),
        "growth_gib": median(lambda one: one["peak_gib"] - one["before_gib"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/tiny-base"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of our side's passes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/grpo_step.json"))
    parser.add_argument("--side", nargs=2, metavar=("ours", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        folder = Path(options.side[1])
        (folder / "ours.json").write_text(json.dumps(ours(folder)))
        return 0
    python = Path(os.environ.get("PARAVT_BENCH_PYTHON", ROOT / ".venv-bench/bin/python"))
    if not python.exists():
        parser.error(f"{python} is missing; run `make setup-bench`")

    params = settings()
    work: dict[str, Any] = {"model": str(options.model.absolute()), "steps": options.steps, "seed": 1}
    work |= {"prompts": PROMPTS, "group": GROUP, "new_tokens": NEW_TOKENS, "threads": options.threads}
    work |= {"micro_batch_tokens": options.micro_batch_tokens}
    work |= {"learning_rate": LEARNING_RATE, "kl_weight": params.grpo.kl_weight}
    sides = {"ours": GROUP, "trl, one pass": PROMPTS * GROUP, "trl, a group a pass": GROUP}
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as holder:
        folder = Path(holder)
        count = PROMPTS * options.steps
        samples, _ = make_split(params.data.needles, 1, "eval", count, folder, f"{folder}/")
        write_jsonl(folder / "samples.jsonl", samples)
        work["items"] = items(params, options.model, samples, folder)
        for _ in range(options.rounds):
            for side, batch in sides.items():
                measured[side].append(run(side, folder, work | {"batch": batch}, python))
                last = figures(measured[side][-1:])
                print(
                    f"  {side}: {last['trained_tokens_per_s']:.0f} tokens/s, {last['peak_gib']:.2f} GiB",
                    flush=True,
                )
    found = {side: figures(rounds) for side, rounds in measured.items()}
    theirs = [found[side] for side in sides if side != "ours"]
    result = {
        "model": str(options.model),
        "prompts": PROMPTS,
        "group": GROUP,
        "frames": FRAMES,
        "new_tokens": NEW_TOKENS,
        "threads": options.threads,
        "micro_batch_tokens": options.micro_batch_tokens,
        "load_average": os.getloadavg()[0],
        "sides": found,
        "times_the_tokens_per_s": found["ours"]["trained_tokens_per_s"]
        / max(one["trained_tokens_per_s"] for one in theirs),
        "times_the_peak": found["ours"]["peak_gib"] / min(one["peak_gib"] for one in theirs),
        "times_the_growth": found["ours"]["growth_gib"] / min(one["growth_gib"] for one in theirs),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for side, one in found.items():
        print(side + ": " + ", ".join(f"{name} {value:.2f}" for name, value in one.items()))
    for name in ("times_the_tokens_per_s", "times_the_peak", "times_the_growth"):
        print(f"{name}: {result[name]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
