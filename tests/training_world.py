"""A world in which training takes seconds: two small clips, traces and questions, the random tiny model.

`python -m tests.training_world FOLDER` runs SFT and then GRPO in FOLDER, each resumable; tests kill it.
"""

from __future__ import annotations

from pathlib import Path
import sys

import av
import numpy as np
from transformers import Qwen3VLForConditionalGeneration

from paravt.chat import ChatEncoder
from paravt.config import (
    AnchoringConfig,
    BudgetConfig,
    EpisodeConfig,
    GRPOConfig,
    OptimiserConfig,
    RewardConfig,
    SFTConfig,
    SubagentConfig,
)
from paravt.data.schema import TraceRow, TraceTurn
from paravt.engines import TransformersEngine
from paravt.export import write_model_folder
from paravt.grpo import GRPOSetup
from paravt.grpo import train as train_grpo
from paravt.model import load_encoder, load_model
from paravt.reporter import LogReporter
from paravt.rollout import Sample
from paravt.sft import SFTSetup
from paravt.sft import train as train_sft
from tests.tiny import VISUAL, build_tiny

EPISODE = EpisodeConfig(
    mode="agentic_minimal",
    temperature=1.0,
    max_turns=1,
    max_new_tokens=40,
    subagent=SubagentConfig(max_new_tokens=8),
)
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 3}}\n</tool_call>'
SECONDS = 6
CLIPS = ("a.mp4", "b.mp4")


def write_clips(folder: Path) -> None:
    """6 s at 5 frames a second, 32 x 32, brightness growing with time."""
    for number, name in enumerate(CLIPS):
        if (folder / name).exists():
            continue
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream("libx264", rate=5)
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            for i in range(SECONDS * 5):
                image = np.full((32, 32, 3), 60 * number + 4 * i, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())


def question(number: int, answer: str = "A") -> Sample:
    """The `number`-th question: about one of the clips, in one of two wordings."""
    word = ("circle", "square")[number // 2 % 2]
    text = f"Which shape shows in the {word} part?"
    return Sample(f"q{number}", CLIPS[number % 2], text, answer, "mcq", ("circle", "square"))


def trace(number: int, text: str, sample: Sample | None = None) -> TraceRow:
    """A trace of one turn."""
    return TraceRow(f"t{number}", sample or question(number), 4, "main", (TraceTurn("assistant", text),))


def tool_trace(number: int, text: str) -> TraceRow:
    """A trace that looks at one window and then says `text`."""
    turns = (
        TraceTurn("assistant", f"look\n</think>\n{CALL}"),
        TraceTurn("tool", results=("a red circle",)),
        TraceTurn("assistant", text),
    )
    return TraceRow(f"t{number}", question(number), 4, "main", turns)


def report_trace(number: int) -> TraceRow:
    turns = (TraceTurn("assistant", "a red circle"),)
    return TraceRow(f"t{number}", question(number), 4, "subagent", turns, (1.0, 3.0))


def sft_setup(**changes) -> SFTSetup:
    config = {
        "steps": 6,
        "batch_size": 4,
        "freeze_vision": False,
        "save_every": 2,
        "optimiser": OptimiserConfig(learning_rate=3e-3, schedule="cosine", warmup_share=0.2),
    }
    return SFTSetup(1, EPISODE, SFTConfig(**config | changes))


def grpo_setup(**changes) -> GRPOSetup:
    config = {
        "steps": 5,
        "prompts_per_step": 2,
        "group_size": 4,
        "freeze_vision": False,
        "save_every": 2,
        "optimiser": OptimiserConfig(learning_rate=1e-3),
    }
    return GRPOSetup(
        seed=1,
        visual=VISUAL,
        budget=BudgetConfig(choices=[2, 4]),
        episode=EPISODE,
        reward=RewardConfig(),
        anchoring=AnchoringConfig(),
        grpo=GRPOConfig(**config | changes),
    )


def loose_traces() -> list[TraceRow]:
    """The same question answered A and B, with and without its tags, with and without a look."""
    texts = [
        "look\n</think>\n<answer>A</answer>",
        "look\n</think>\n<answer>B</answer>",
        "look\n<answer>A</answer>",
        "look\n</think>\nB",
    ]
    traces = [trace(number, texts[number % 4], question(number // 4)) for number in range(8)]
    return [*traces, tool_trace(8, texts[0]), tool_trace(9, texts[1]), report_trace(10), report_trace(11)]


def run_sft(
    scratch: Path, base: Path, traces: list[TraceRow], setup: SFTSetup, videos: Path
) -> tuple[Qwen3VLForConditionalGeneration, ChatEncoder]:
    """The trained model and its encoder."""
    model, encoder = load_model(base), load_encoder(base, VISUAL)
    train_sft(model, encoder, traces, setup, LogReporter(), scratch, videos)
    return model, encoder


def run_pipeline(folder: Path) -> None:
    """SFT, then GRPO from it: folder/models/{base,sft,grpo}, scratch in folder/{sft,grpo}."""
    folder.mkdir(parents=True, exist_ok=True)
    write_clips(folder)
    base, tuned = folder / "models" / "base", folder / "models" / "sft"
    if not base.exists():
        build_tiny(base)
    model, _ = run_sft(folder / "sft", base, loose_traces(), sft_setup(), folder)
    write_model_folder(model, base, tuned)
    model, encoder = load_model(tuned), load_encoder(tuned, VISUAL)
    engine = TransformersEngine(model, encoder.end_ids)
    samples = [question(number) for number in range(3)]
    reporter = LogReporter()
    train_grpo(
        model, None, engine, encoder, samples, grpo_setup(), reporter, folder / "grpo", video_root=folder
    )
    write_model_folder(model, tuned, folder / "models" / "grpo")


if __name__ == "__main__":
    run_pipeline(Path(sys.argv[1]))
