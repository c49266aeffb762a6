"""A real vLLM server on an architecture-true 8B with fewer layers: episodes, log-probs, a change of weights.

    make setup-vllm DEVICE=gpu
    bash bench/gpu_vllm.sh                       on one GPU, about ten minutes, no network
    bash bench/gpu_vllm.sh --transfer nccl       on two GPUs: the trainer's and the server's
    python -m bench.gpu_vllm --micro             the same code on vLLM's CPU build, widths cut down too

The model is that of bench/gpu_train.py with the tokenizer of models/tiny-base; weights are noise. The
server is started as a stage starts it, asked for episodes on a rendered video, given other weights (over the
disk, or as `--transfer` says), and asked again. Prints seconds, tokens per second, and how far the engine's
log-probs are from the trainer's, as JSON with `--out`. It ends non-zero if an episode failed, if trainer and
engine disagree before or after the change, if the change is not in the answers, or if an answer has not the
label of its weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
import sys
import tempfile
import time

import torch
from transformers import Qwen3VLForConditionalGeneration

from bench.gpu_train import MICRO, build
from paravt.agent import AgentSetup, run_episodes
from paravt.architecture import QWEN3_VL_8B
from paravt.config import Params
from paravt.data.needles import make_split
from paravt.engines.factory import make_engine
from paravt.engines.limits import PromptLimits
from paravt.export import write_model_folder
from paravt.model import collate, load_encoder, load_model, token_logprobs
from paravt.rollout import Rollout
from stages.params import ROOT, check, compose

BASE = ROOT / "models/tiny-base"
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
FRAMES, QUESTIONS, GROUP, NEW_TOKENS = 64, 4, 8, 256
ALLOWED = 0.05  # of the mean ratio from 1: the trainer works in 16 bits


def parameters(micro: bool, transfer: str) -> Params:
    """Those of the layout of one GPU; with vLLM's CPU build those of tiny. NCCL wants a GPU for each side."""
    params = check(compose(["engine=vllm"] if micro else ["scale=paravt_8b", "layout=1x80"]))
    episode = {"max_turns": 1, "max_new_tokens": 24 if micro else NEW_TOKENS, "temperature": 1.0}
    engine = {"weight_transfer": transfer} | ({"first_gpu": 1} if transfer == "nccl" else {})
    changes = {"episode": params.episode.model_copy(update=episode)}
    return params.model_copy(update=changes | {"engine": params.engine.model_copy(update=engine)})


def distance(
    model: Qwen3VLForConditionalGeneration, rollouts: list[Rollout], device: str
) -> dict[str, float]:
    """Trainer against engine over sampled tokens: mean ratio, largest difference of log-probs."""
    found = []
    for rollout in rollouts:
        for conversation in (rollout.main, *rollout.subagents):
            batch = collate([conversation]).to(device)
            with torch.no_grad():
                policy_logprobs, _ = token_logprobs(model, batch, 1.0)
            found.append((policy_logprobs - batch.engine_logprobs)[batch.loss_mask.bool()].double().cpu())
    gaps = torch.cat(found) if found else torch.full((1,), math.nan)
    return {"ratio": gaps.exp().mean().item(), "largest_gap": gaps.abs().max().item(), "tokens": len(gaps)}


def turn_around(model: Qwen3VLForConditionalGeneration) -> None:
    """Other weights of the same size in the language model."""
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.mlp.down_proj.weight.neg_()


def work(params: Params, layers: int, micro: bool, folder: Path) -> tuple[dict, list[str]]:
    """What was measured, and what is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = MICRO if micro else QWEN3_VL_8B.shallow(layers, 9)
    dtype = getattr(torch, params.engine.dtype)
    tokens = json.loads((BASE / "config.json").read_text())
    model = build(sizes, dtype, {name: tokens[name] for name in TOKENS})
    first, second = folder / "first", folder / "second"
    write_model_folder(model, BASE, first)
    turn_around(model)
    write_model_folder(model, BASE, second)
    encoder = load_encoder(first, params.visual)
    frames = 8 if micro else FRAMES
    samples, _ = make_split(params.data.needles, 1, "eval", QUESTIONS, folder, f"{folder}/")
    agent = AgentSetup(encoder, params.episode, params.visual, lambda sample: frames, 1, GROUP)
    limits = PromptLimits.of(params.episode, params.visual, frames)
    started = time.perf_counter()
    faults, passes = [], {}
    with make_engine(params.engine, first, encoder, limits) as engine:
        result: dict = {"server_start_s": time.perf_counter() - started}
        for version, weights in enumerate((first, second)):
            if version:
                started = time.perf_counter()
                engine.load_weights(str(weights), version)
                result["load_weights_s"] = time.perf_counter() - started
            started = time.perf_counter()
            rollouts = passes[version] = run_episodes(engine, samples, agent)
            seconds = time.perf_counter() - started
            failed = [rollout.error for rollout in rollouts if rollout.stop_reason == "failed"]
            faults += [f"weights {version}: {len(failed)} episodes failed: {failed[0]}"] if failed else []
            trainer = load_model(weights, dtype).to(device).eval()
            found = distance(trainer, [r for r in rollouts if r.stop_reason != "failed"], device)
            del trainer
            found |= {
                "seconds": seconds,
                "episodes": len(rollouts),
                "tokens_per_s": found["tokens"] / seconds,
            }
            result[f"weights_{version}"] = found
            if not abs(found["ratio"] - 1) <= ALLOWED:  # so that NaN is a fault
                faults.append(f"weights {version}: the mean ratio is {found['ratio']:.3f}")
            labels = {label for rollout in rollouts for label in rollout.weight_versions}
            if labels != {version}:
                faults.append(f"weights {version}: answers are labelled {sorted(labels)}")
    if all(a.main.ids == b.main.ids for a, b in zip(passes[0], passes[1], strict=True)):
        faults.append("other weights gave the same answers")
    result |= {"layers": sizes.layers, "parameters": sizes.parameters, "dtype": str(dtype)}
    return result | {"weight_transfer": params.engine.weight_transfer}, faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_vllm", description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=6, help="decoder layers of full width (%(default)s)")
    parser.add_argument("--micro", action="store_true", help="cut the widths down: a dry run on a CPU")
    parser.add_argument("--transfer", choices=("disk", "gloo", "nccl"), default="disk", help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args()
    if not options.micro and not torch.cuda.is_available():
        print("no GPU is here; --micro runs the same code on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="paravt-gpu-") as holder:
        params = parameters(options.micro, options.transfer)
        result, faults = work(params, options.layers, options.micro, Path(holder))
    result["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    result |= {"load_average": os.getloadavg()[0], "faults": faults}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
