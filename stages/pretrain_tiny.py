"""Pretrain the tiny base from nothing: perception, reports, dispatch and answers, in a loose format.

Not a stage of the pipeline. It is run once; its result is tracked in git as models/tiny-base, and plays the
part that Qwen3-VL-8B-Instruct plays at full scale. Every batch follows from (seed, step), so a run that was
stopped goes on where its last checkpoint stands.

    python -m stages.pretrain_tiny --out models/tiny-base

With `--start` it goes on from a model that is there, for example to give it other habits:

    python -m stages.pretrain_tiny --start models/tiny-base --tool-share 0 --steps 200 --work W --out FOLDER
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
import json
import math
from pathlib import Path
import time

import numpy as np
import torch
from transformers import AutoTokenizer

from paravt.chat import ChatEncoder
from paravt.config import NeedlesConfig, VisualConfig
from paravt.conversation import Conversation
from paravt.data.loose import Looseness, loosen
from paravt.data.needles import (
    KINDS,
    Scene,
    make_question,
    make_scene,
    overview_times_s,
    stable_rng,
    write_video,
)
from paravt.data.tiny_model import new_model, train_tokenizer, write_companions
from paravt.data.traces import main_trace, report_text
from paravt.model import Batch, collate, load_model, token_logprobs
from paravt.protocol.prompts import THINK_PREFIX, question_text, subagent_instruction, system_prompt
from paravt.rollout import Sample
from paravt.video import Frames, crop_times_s, open_video

NEEDLES = NeedlesConfig(sft_count=1, rl_count=1, eval_count=1)
VISUAL = VisualConfig(min_pixels=1024, max_pixels=1024)
MODE = "agentic_minimal"
BUDGETS = (4, 8, 16)
VOCABULARY = 1000


@dataclass
class Clip:
    """A scene and all its decoded frames."""

    scene: Scene
    frames: np.ndarray
    times_s: np.ndarray

    def at(self, times_s: np.ndarray) -> Frames:
        index = np.searchsorted(self.times_s, np.asarray(times_s) + 1e-6, side="right") - 1
        index = np.unique(np.clip(index, 0, None))
        times_s = self.times_s[index]
        return Frames(self.frames[index], times_s, (float(times_s[0]), float(times_s[-1])), False)

    def crop(self, start_s: float, end_s: float) -> Frames:
        return self.at(crop_times_s(start_s, end_s, VISUAL.crop_fps, VISUAL.crop_max_frames))


def make_pool(count: int, seed: int, folder: Path) -> list[Clip]:
    """`count` rendered and decoded clips; mp4 files are kept in `folder` and used again."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = []
    for index in range(count):
        scene = make_scene(NEEDLES, seed, "pretrain", index)
        path = folder / f"{scene.id}.mp4"
        if not path.exists():
            write_video(scene, path.with_suffix(".part.mp4"), NEEDLES)
            path.with_suffix(".part.mp4").rename(path)
        with open_video(str(path)) as video:
            pool.append(Clip(scene, video.frames_at(video.times_s), video.times_s))
    return pool


def ask(clip: Clip, rng: np.random.Generator) -> Sample:
    return make_question(clip.scene, "video.mp4", KINDS[rng.integers(len(KINDS))], 0, rng)


def main_conversation(
    encoder: ChatEncoder, clip: Clip, sample: Sample, budget: int, use_tool: bool, loose: Looseness, rng
) -> Conversation:
    """One episode of the main agent, teacher-written, in a loose hand."""
    overview = clip.at(overview_times_s(clip.scene.duration_s, NEEDLES.fps, budget))
    trace = main_trace(clip.scene, sample, overview.times_s, use_tool)
    crops = [clip.crop(look.start_s, look.end_s) for look in trace.looks]
    if use_tool:
        trace = main_trace(clip.scene, sample, overview.times_s, True, [c.times_s for c in crops])
    conversation = encoder.start(
        system_prompt(MODE), overview, "video.mp4", question_text(sample, MODE), THINK_PREFIX
    )
    encoder.add_gold(conversation, loosen(trace.turns[0], loose, rng))
    if use_tool:
        reports = [report_text(clip.scene, crop.times_s) for crop in crops]
        encoder.add_tool_results(conversation, reports, "video.mp4", THINK_PREFIX)
        encoder.add_gold(conversation, loosen(trace.turns[1], loose, rng))
    return conversation


def report_conversation(encoder: ChatEncoder, clip: Clip, rng: np.random.Generator) -> Conversation:
    """One sub-agent looking at a window such as main agents ask for."""
    overview_s = overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS)))
    start, end = sorted(rng.choice(len(overview_s), 2, replace=False))
    window_s = (float(overview_s[start]), float(overview_s[end]))
    crop = clip.crop(*window_s)
    conversation = encoder.start(None, crop, "video.mp4", subagent_instruction(window_s))
    encoder.add_gold(conversation, report_text(clip.scene, crop.times_s))
    return conversation


def drill_conversation(encoder: ChatEncoder, clip: Clip, loose: Looseness, rng) -> Conversation:
    """Text alone: reports, a question, the closing turn. Cheap practice of lookup and of the options."""
    kind = KINDS[rng.choice(len(KINDS), p=(0.4, 0.3, 0.15, 0.15))]
    sample = make_question(clip.scene, "video.mp4", kind, 0, rng)
    overview_s = overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS)))
    looks = main_trace(clip.scene, sample, overview_s, True).looks
    crops_s = [clip.crop(look.start_s, look.end_s).times_s for look in looks]
    if kind != "when" and rng.random() < 0.6:  # the bare facts: shorter still, all practice is in the options
        parts = [clip.scene.parts[i] for i in rng.permutation(len(clip.scene.parts))]
        reports = "\n".join(f"{part.colour} {part.shape}" for part in parts)
    else:
        reports = "\n".join(report_text(clip.scene, times_s) for times_s in crops_s)
    text = f"{reports}\n{question_text(sample, MODE)}"
    conversation = encoder.start(None, None, "video.mp4", text, THINK_PREFIX)
    gold = main_trace(clip.scene, sample, overview_s, True, crops_s).turns[1]
    encoder.add_gold(conversation, loosen(gold, loose, rng))
    return conversation


def conversation_stream(encoder: ChatEncoder, pool: list[Clip], args, step: int) -> list[Conversation]:
    """The conversations of one step; they depend on (seed, step) alone."""
    rng = stable_rng(args.seed, "step", step)
    loose = Looseness().scaled(args.looseness)
    made = []
    for _ in range(args.batch):
        clip = pool[rng.integers(len(pool))]
        draw = rng.random()
        if draw < args.report_share:
            made.append(report_conversation(encoder, clip, rng))
        elif draw < args.report_share + args.drill_share:
            made.append(drill_conversation(encoder, clip, loose, rng))
        else:
            use_tool = rng.random() < args.tool_share
            budget = int(rng.choice(BUDGETS))
            made.append(main_conversation(encoder, clip, ask(clip, rng), budget, use_tool, loose, rng))
    return made


def micro_batches(conversations: list[Conversation], tokens: int) -> list[Batch]:
    """Batches of like length, each of at most `tokens` padded tokens."""
    batches, current = [], []
    for conversation in sorted(conversations, key=lambda c: len(c.ids)):
        if current and (len(current) + 1) * len(conversation.ids) > tokens:
            batches.append(current)
            current = []
        current.append(conversation)
    return [collate(batch) for batch in [*batches, current]]


def learning_rate(step: int, args) -> float:
    warmup = min(1.0, (step + 1) / args.warmup)
    progress = min(1.0, step / args.steps)
    return args.learning_rate * warmup * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))


def corpus(pool: list[Clip], seed: int) -> list[str]:
    """Texts that the tokenizer is learned from: each time of day of the world, then what agents write."""
    rng = stable_rng(seed, "corpus")
    texts = [f"<{t / 10:.1f} seconds>" for t in range(300)] * 40
    texts += ["system\n", "user\n", "assistant\n"] * 4000
    for _ in range(4000):
        clip = pool[rng.integers(len(pool))]
        sample = ask(clip, rng)
        overview_s = overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS)))
        crops = [
            clip.crop(look.start_s, look.end_s).times_s
            for look in main_trace(clip.scene, sample, overview_s, True).looks
        ]
        trace = main_trace(clip.scene, sample, overview_s, True, crops)
        texts += [system_prompt(MODE), question_text(sample, MODE), subagent_instruction((1.0, 2.0))]
        texts += [loosen(turn, Looseness(), rng) for turn in trace.turns]
        texts += [report_text(clip.scene, times_s) for times_s in crops]
    return texts


def train(args) -> None:
    work = Path(args.work)
    pool = make_pool(args.clips, args.seed, work / "videos")
    print(f"{len(pool)} clips", flush=True)
    state_path = work / "state.pt"
    tokenizer_folder = Path(args.start or work / "tokenizer")
    if not tokenizer_folder.exists():
        train_tokenizer(corpus(pool[:500], args.seed), VOCABULARY).save_pretrained(tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    encoder = ChatEncoder(tokenizer, VISUAL)
    torch.manual_seed(args.seed)
    model = new_model(tokenizer) if not args.start else load_model(args.start)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    step = 0
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step = state["step"]
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, from step {step}", flush=True)
    started, seen = time.monotonic(), 0
    model.train()
    while step < args.steps:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args)
        batches = micro_batches(conversation_stream(encoder, pool, args, step), args.tokens)
        total = sum(int(batch.loss_mask.sum()) for batch in batches)
        loss_sum = 0.0
        for batch in batches:
            logprobs, _ = token_logprobs(model, batch, 1.0)
            loss = -logprobs.sum() / total
            loss.backward()
            loss_sum += loss.item()
            seen += int(batch.attention_mask.sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        if step % 20 == 0:
            rate = seen / (time.monotonic() - started)
            print(f"step {step} loss {loss_sum:.4f} {rate:.0f} tokens/s", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
            torch.save(state, state_path.with_suffix(".part"))
            state_path.with_suffix(".part").rename(state_path)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    write_companions(out, tokenizer, VISUAL.max_pixels)
    print(json.dumps({"steps": step, "loss": round(loss_sum, 4)}))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="models/tiny-base", help="folder of the finished model")
    parser.add_argument("--work", default=".scratch/pretrain", help="videos, tokenizer and checkpoint")
    parser.add_argument("--start", default=None, help="model folder to go on from instead of fresh weights")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=28, help="conversations per step")
    parser.add_argument("--tokens", type=int, default=8192, help="padded tokens per forward pass")
    parser.add_argument("--clips", type=int, default=1500)
    parser.add_argument("--report-share", type=float, default=0.2)
    parser.add_argument("--drill-share", type=float, default=0.45)
    parser.add_argument("--tool-share", type=float, default=0.7)
    parser.add_argument("--looseness", type=float, default=1.0, help="factor on each habit's chance")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=100)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
