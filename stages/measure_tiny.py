"""Measure each ability of a tiny model on its own, greedily, on clips that no training saw.

Never the total alone: a small model can list frames perfectly and copy nothing. Figures:

    report      sub-agent reports equal to the teacher's, line for line
    listing     overview listings (time, colour, shape of each frame) equal to the teacher's
    window      asked parts that one of the written windows covers whole
    lookup      shapes read correctly out of given reports
    answer      answers right once the reports are given (a span: IoU at least 0.5)
    compliance  well-formed first turns, by the parser

    python -m stages.measure_tiny --model models/tiny-base --count 200
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paravt.chat import ChatEncoder
from paravt.conversation import Conversation
from paravt.data.needles import overview_times_s, stable_rng
from paravt.data.traces import main_trace, report_text
from paravt.engines.base import Request, Sampling
from paravt.engines.transformers import TransformersEngine
from paravt.model import load_encoder, load_model
from paravt.protocol import parse_turn
from paravt.protocol.prompts import THINK_PREFIX, question_text, subagent_instruction, system_prompt
from paravt.rollout import ToolCall
from stages.pretrain_tiny import BUDGETS, MODE, NEEDLES, VISUAL, Clip, ask, make_pool


def generate(
    engine: TransformersEngine, conversations: list[Conversation], encoder: ChatEncoder
) -> list[str]:
    sampling = Sampling(temperature=0.0, max_new_tokens=240)
    requests = [Request(tuple(c.ids), tuple(c.visuals), sampling) for c in conversations]
    return [encoder.decode(generations[0].ids) for generations in engine.generate(requests)]


def share(hits: list[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def reports(
    engine: TransformersEngine, encoder: ChatEncoder, pool: list[Clip], count: int
) -> dict[str, float]:
    rng = stable_rng("measure", "report")
    conversations, wanted = [], []
    for _ in range(count):
        clip = pool[rng.integers(len(pool))]
        overview_s = overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS)))
        looks = main_trace(clip.scene, ask(clip, rng), overview_s, True).looks
        look = looks[rng.integers(len(looks))]
        crop = clip.crop(look.start_s, look.end_s)
        window_s = (look.start_s, look.end_s)
        conversations.append(encoder.start(None, crop, "video.mp4", subagent_instruction(window_s)))
        wanted.append(report_text(clip.scene, crop.times_s))
    written = generate(engine, conversations, encoder)
    return {"report": share([a == b for a, b in zip(written, wanted, strict=True)])}


def dispatches(
    engine: TransformersEngine, encoder: ChatEncoder, pool: list[Clip], count: int
) -> dict[str, float]:
    rng = stable_rng("measure", "dispatch")
    conversations, clips, samples, wanted = [], [], [], []
    for _ in range(count):
        clip = pool[rng.integers(len(pool))]
        sample = ask(clip, rng)
        overview = clip.at(overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS))))
        conversations.append(
            encoder.start(
                system_prompt(MODE), overview, "video.mp4", question_text(sample, MODE), THINK_PREFIX
            )
        )
        clips.append(clip)
        samples.append(sample)
        wanted.append(
            main_trace(clip.scene, sample, overview.times_s, True).turns[0].partition("</think>")[0]
        )
    turns = [parse_turn(THINK_PREFIX + text) for text in generate(engine, conversations, encoder)]
    covered = []
    for turn, clip, sample in zip(turns, clips, samples, strict=True):
        if not turn.calls:
            continue  # answered from the overview: no window was asked for
        windows = [call.arguments for call in turn.calls if isinstance(call, ToolCall)]
        for colour in sample.meta["asked"]:
            part = clip.scene.part_of(colour)
            covered.append(
                any(
                    float(w["start_time"]) <= part.start_s + 0.11
                    and float(w["end_time"]) >= part.end_s - 0.11
                    for w in windows
                    if {"start_time", "end_time"} <= w.keys()
                )
            )
    return {
        "listing": share([(t.think or "").startswith(w.strip()) for t, w in zip(turns, wanted, strict=True)]),
        "window": share(covered or [False]),
        "calls": share([bool(turn.calls) for turn in turns]),
        "compliance": share([turn.well_formed for turn in turns]),
    }


def answers(
    engine: TransformersEngine, encoder: ChatEncoder, pool: list[Clip], count: int
) -> dict[str, float]:
    rng = stable_rng("measure", "answer")
    conversations, wanted = [], []
    for _ in range(count):
        clip = pool[rng.integers(len(pool))]
        sample = ask(clip, rng)
        overview = clip.at(overview_times_s(clip.scene.duration_s, NEEDLES.fps, int(rng.choice(BUDGETS))))
        looks = main_trace(clip.scene, sample, overview.times_s, True).looks
        crops = [clip.crop(look.start_s, look.end_s) for look in looks]
        trace = main_trace(clip.scene, sample, overview.times_s, True, [crop.times_s for crop in crops])
        conversation = encoder.start(
            system_prompt(MODE), overview, "video.mp4", question_text(sample, MODE), THINK_PREFIX
        )
        encoder.add_gold(conversation, trace.turns[0])
        texts = [report_text(clip.scene, crop.times_s) for crop in crops]
        encoder.add_tool_results(conversation, texts, "video.mp4", THINK_PREFIX)
        conversations.append(conversation)
        wanted.append((sample, trace.turns[1]))
    figures: dict[str, list[bool]] = {"lookup": []}
    for text, (sample, gold) in zip(generate(engine, conversations, encoder), wanted, strict=True):
        lines = len(sample.meta["asked"])
        figures["lookup"].append(text.splitlines()[:lines] == gold.splitlines()[:lines])
        gold_answer = gold.partition("<answer>")[2].removesuffix("</answer>")
        right = gold_answer in text.partition("</think>")[2] or text.splitlines()[-1:] == [gold_answer]
        figures.setdefault(f"answer_{sample.meta['kind']}", []).append(right)
    return {key: share(hits) for key, hits in figures.items()}


def measure(folder: str, count: int, work: str) -> dict[str, float]:
    encoder = load_encoder(folder, VISUAL)
    engine = TransformersEngine(load_model(folder), encoder.end_ids)
    pool = make_pool(100, 1234567, Path(work) / "heldout")
    return {
        name: value
        for part in (reports, dispatches, answers)
        for name, value in part(engine, encoder, pool, count).items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/tiny-base")
    parser.add_argument("--count", type=int, default=200, help="questions per ability")
    parser.add_argument("--work", default=".scratch/pretrain", help="where the held-out clips are kept")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.count, arguments.work), indent=2))
