"""One SFT step and one PARA-GRPO step of an architecture-true 8B with fewer layers, memory against the plan.

    bash bench/gpu_train.sh                      on one GPU, about ten minutes, no network
    python -m bench.gpu_train --micro            the same code on a CPU, widths cut down too

Layers of the full width, the whole vocabulary, 224 x 224 frames; weights are noise. What runs is what the
stages run: packed SFT in 16 bits with checkpointed activations, then a group of episodes by the transformers
engine and one update on them. The advantages alternate, since noise answers nothing, and no frozen start is
held. It prints seconds and the peak of the GPU's memory beside what `paravt.plan` says of the same depth, as
JSON with `--out`. It ends non-zero if a loss is not finite, no weight moved, a frozen one did, trainer and
engine disagree, or the peak is above the plan.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
import sys
import tempfile
import time

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from paravt.architecture import QWEN3_VL_8B, Architecture
from paravt.config import OptimiserConfig, Params
from paravt.conversation import Conversation, Visual
from paravt.engines import TransformersEngine
from paravt.engines.base import Request, Sampling
from paravt.grpo.batch import Row, blank_micro_batch, make_micro_batches
from paravt.grpo.loss import Denominators, LossInputs, policy_loss
from paravt.plan import GIB, Layout, trainer
from paravt.segments import use_segments
from paravt.sft.trainer import train_step
from paravt.training import TrainingRun
from stages.params import check, compose

IMAGE_PAD, END, VISION_START, VISION_END = 151_655, 151_645, 151_652, 151_653
MICRO = Architecture(
    hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_size=128, vision_hidden=64,
    vision_intermediate=128, vision_depth=4, vision_heads=4, taps=(1, 2, 3),
)  # fmt: skip


def parameters(micro: bool) -> Params:
    """Those of the layout of one GPU, with whole weights in place of adapters."""
    changes = ["train.lora=null", "sft.optimiser.learning_rate=2e-5", "grpo.optimiser.learning_rate=2e-6"]
    if micro:
        changes += ["sft.micro_batch_tokens=1024", "grpo.micro_batch_tokens=1024", "visual.max_pixels=4096"]
    return check(compose(["scale=paravt_8b", "layout=1x80", *changes]))


def build(
    sizes: Architecture, dtype: torch.dtype, tokens: dict[str, int] | None = None
) -> Qwen3VLForConditionalGeneration:
    """Random weights of `sizes`, on the GPU if there is one; `tokens`: other ids than the published."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**sizes.config() | (tokens or {}))).eval()
    finally:
        torch.set_default_dtype(before)


def prompt(frames: int, side: int, seed: int) -> Conversation:
    """`frames` frames of noise after their times, and a question of 200 tokens."""
    rng = np.random.default_rng(seed)
    conversation = Conversation(IMAGE_PAD)
    for number in range(frames):
        image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        visual = Visual("noise", float(number), (1, side // 16, side // 16), image)
        mark = rng.integers(0, 50_000, 7).tolist()
        ids = [*mark, VISION_START, *[IMAGE_PAD] * visual.token_count, VISION_END]
        conversation.append_prompt(ids, [visual])
    conversation.append_prompt(rng.integers(0, 50_000, 200).tolist())
    return conversation


def begin(model, params: Params, optimiser: OptimiserConfig, folder: Path, name: str) -> TrainingRun:
    return TrainingRun(
        model,
        optimiser,
        steps=2,
        save_every=9,
        keep=1,
        frozen_vision=True,
        scratch_dir=folder / name,
        identity=name,
        train=params.train,
    )


def sft_step(model, params: Params, folder: Path, side: int) -> tuple[dict, int]:
    """One packed step over samples of several lengths; its metrics and tokens."""
    use_segments(model)
    run = begin(model, params, params.sft.optimiser, folder, "sft")
    frames = (4, 8, 16, 32, 64, 64) if side == 224 else (2, 4, 8, 8)
    samples = [prompt(count, side, seed) for seed, count in enumerate(frames)]
    for seed, sample in enumerate(samples):
        written = np.random.default_rng(seed).integers(0, 50_000, 300 if side == 224 else 8).tolist()
        sample.append_sampled([*written, END], [0.0] * (len(written) + 1))
    samples = [sample for sample in samples if len(sample.ids) <= params.sft.micro_batch_tokens]
    values = train_step(run, 0, samples, params.sft, ["noise"])
    return values, sum(len(sample.ids) for sample in samples)


def grpo_step(model, params: Params, folder: Path, side: int, new_tokens: int) -> tuple[dict, dict]:
    """A group of episodes and one update on it; its metrics and seconds by part."""
    run = begin(model, params, params.grpo.optimiser, folder, "grpo")
    engine = TransformersEngine(model, {END})
    started = time.perf_counter()
    conversation = prompt(16 if side == 224 else 4, side, 99)
    sampling = Sampling(params.episode.temperature, new_tokens, seed=1, n=params.grpo.group_size)
    with run.accelerator.autocast():
        [answers] = engine.generate([Request(tuple(conversation.ids), tuple(conversation.visuals), sampling)])
    sampled = time.perf_counter() - started
    rows = []
    for number, answer in enumerate(answers):
        episode = conversation.copy()
        episode.append_sampled(answer.ids, answer.logprobs)
        mask = np.asarray(episode.loss_mask, dtype=bool)
        sign = 1.0 if number % 2 else -1.0
        rows.append(Row(episode, np.where(mask, sign, 0.0), np.zeros(len(mask), dtype=bool)))
    tokens = sum(row.conversation.sampled_count for row in rows)
    denominators = Denominators(tokens, len(rows), new_tokens)
    loss, ratios = 0.0, []
    started = time.perf_counter()
    for micro in run.passes(make_micro_batches(rows, params.grpo.micro_batch_tokens)):
        micro = (micro or blank_micro_batch()).to(run.accelerator.device)
        scores = run.scores(micro.batch, params.episode.temperature)
        inputs = LossInputs(
            policy_logprobs=scores.logprobs,
            proximal_logprobs=scores.logprobs.detach(),
            engine_logprobs=micro.batch.engine_logprobs,
            advantages=micro.advantages,
            loss_mask=micro.batch.loss_mask,
            entropy=scores.entropy,
            structural=micro.structural,
            denominators=denominators,
        )
        output = policy_loss(inputs, params.grpo.model_copy(update={"kl": "none"}))
        loss += run.backward(output.loss)
        ratios.append([value.item() for value in output.sums["ratio_before"]])
    values = run.update(0, loss, ["noise"])
    ratio = sum(value for value, _ in ratios) / sum(count for _, count in ratios)
    return values | {"ratio": ratio, "sampled_tokens": tokens}, {
        "sample_s": sampled,
        "update_s": time.perf_counter() - started,
    }


def measured(work) -> tuple[object, float, float | None]:
    """What `work` gives, its seconds, and the GPU's peak in GiB."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = work()
    if gpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - started, torch.cuda.max_memory_allocated() / GIB if gpu else None


def checksums(model) -> tuple[float, float]:
    """Of the vision tower and of the language model."""
    sums = [0.0, 0.0]
    for name, weight in model.named_parameters():
        sums["visual" not in name] += weight.detach().double().abs().sum().item()
    return sums[0], sums[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_train", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--layers", type=int, default=6, help="decoder layers of the full width (%(default)s)"
    )
    parser.add_argument("--micro", action="store_true", help="cut the widths down: a dry run on a CPU")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of an episode (%(default)s)")
    parser.add_argument("--out", help="write the result there as JSON")
    chosen = parser.parse_args()
    if not chosen.micro and not torch.cuda.is_available():
        print("no GPU is here; --micro runs the same code on a CPU", file=sys.stderr)
        return 2
    params = parameters(chosen.micro)
    sizes = MICRO if chosen.micro else QWEN3_VL_8B.shallow(chosen.layers, 9)
    side, tokens = (64, 8) if chosen.micro else (224, chosen.new_tokens)
    dtype = getattr(torch, params.train.dtype)
    model = build(sizes, dtype)
    start = checksums(model)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    result: dict = {"gpu": gpu, "layers": sizes.layers, "parameters": sizes.parameters, "dtype": str(dtype)}
    faults = []
    with tempfile.TemporaryDirectory(prefix="paravt-gpu-") as folder:
        (values, count), seconds, peak = measured(lambda: sft_step(model, params, Path(folder), side))
        result["sft"] = values | {"tokens_read": count, "seconds": seconds, "peak_gib": peak}
        middle = checksums(model)
        model.set_attn_implementation({"text_config": "sdpa"})
        (values, parts), seconds, peak = measured(
            lambda: grpo_step(model, params, Path(folder), side, tokens)
        )
        result["para_grpo"] = values | parts | {"seconds": seconds, "peak_gib": peak}
    end = checksums(model)
    layout = Layout("this GPU", 1, 1e9)
    for stage, budget in (
        ("sft", params.sft.micro_batch_tokens),
        ("para_grpo", params.grpo.micro_batch_tokens),
    ):
        planned = trainer(params, layout, sizes, 1, budget, rl=stage == "para_grpo")
        parts = {name: gib for name, gib in planned.gib.items() if name != "reference"}  # none is held here
        result[stage] |= {"planned_gib": sum(parts.values())}
        peak = result[stage]["peak_gib"]
        if peak is not None and peak > result[stage]["planned_gib"]:
            faults.append(f"{stage}: peak {peak:.1f} GiB is above the plan of {sum(parts.values()):.1f} GiB")
        if not math.isfinite(result[stage]["loss"]) or not math.isfinite(result[stage]["grad_norm"]):
            faults.append(f"{stage}: the loss is not finite")
    if start[0] != end[0]:
        faults.append("the frozen vision tower has moved")
    if start[1] == middle[1] or middle[1] == end[1]:
        faults.append("a step moved no weight")
    if abs(result["para_grpo"]["ratio"] - 1) > 0.05:
        faults.append(f"the mean ratio of trainer and engine is {result['para_grpo']['ratio']:.3f}")
    result["faults"] = faults
    print(json.dumps(result, indent=1))
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
