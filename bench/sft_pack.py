"""Trained tokens per second of SFT: rows packed by best fit against transformers' own Trainer with padding.

    python -m bench.sft_pack [--steps 8] [--rounds 3] [--row 1024] [--out FILE]

Both train the same model on the same needle traces, encoded before the clock starts: the same samples a
step, the same frozen vision tower, AdamW, rate, clipping and number format. They take turns, so that other
work on the machine slows both. A trained token is one that the loss counts. Prints each round and the
median ratio, as JSON with `--out`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
import statistics
import tempfile
import time

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from paravt.config import OptimiserConfig, SFTConfig
from paravt.conversation import Conversation
from paravt.data.needle_tables import write_tables
from paravt.data.schema import read_traces
from paravt.model import load_encoder, load_model, patchify
from paravt.segments import use_segments
from paravt.sft.data import TraceSource
from paravt.sft.trainer import train_step
from paravt.training import TrainingRun, freeze_vision
from stages.params import check, compose

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-base"
BATCH = 16
RATE = 1e-4
CLOCKS = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}  # on a shared machine the CPU's is the fair one


def clocks() -> dict[str, float]:
    return {name: clock() for name, clock in CLOCKS.items()}


def conversations(folder: Path, count: int) -> list[Conversation]:
    """`count` needle traces as the SFT stage encodes them, frames decoded."""
    params = check(compose(["scale=tiny", f"data.needles.sft_count={count}", "data.needles.rl_count=4"]))
    needles = params.data.needles.model_copy(update={"eval_count": 4})
    write_tables(folder, str(folder), needles, params.visual, params.budget.choices, params.data.seed)
    encoder = load_encoder(MODEL, params.visual)
    traces = read_traces(folder / "sft.jsonl")[:count]
    source = TraceSource(encoder, traces, params.episode)
    return [source.conversation(index) for index in range(len(traces))]


class Packed:
    """The project's own SFT step on packed rows."""

    def __init__(self, work: Path, steps: int, row: int) -> None:
        learning = OptimiserConfig(learning_rate=RATE)
        self.config = SFTConfig(
            steps=steps, batch_size=BATCH, packing=True, micro_batch_tokens=row, optimiser=learning
        )
        model = load_model(MODEL)
        use_segments(model)
        self.run = TrainingRun(
            model,
            learning,
            steps=steps,
            save_every=steps,
            keep=1,
            frozen_vision=True,
            scratch_dir=work,
            identity="bench",
        )

    def steps(self, first: int, batches: list[list[Conversation]]) -> None:
        for number, batch in enumerate(batches):
            train_step(self.run, first + number, batch, self.config, ["bench"])


def item(conversation: Conversation) -> dict:
    """What a data set for the Trainer holds of a sample."""
    ids, mask = torch.tensor(conversation.ids), torch.tensor(conversation.loss_mask).bool()
    return {
        "input_ids": ids,
        "labels": ids.where(mask, torch.tensor(-100)),
        "mm_token_type_ids": (ids == conversation.image_pad_id).int(),
        "pixel_values": patchify([visual.image for visual in conversation.visuals]),
        "image_grid_thw": torch.tensor([visual.grid_thw for visual in conversation.visuals]),
    }


def padded(items: list[dict]) -> dict:
    """A batch as processors make it: padded on the right to its longest sample, frames one after the
    other.
    """
    fill = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {key: pad([item[key] for item in items], True, value) for key, value in fill.items()}
    batch["attention_mask"] = pad([torch.ones_like(item["input_ids"]) for item in items], True, 0)
    for key in ("pixel_values", "image_grid_thw"):
        batch[key] = torch.cat([item[key] for item in items])
    return batch


class Padded:
    """transformers' Trainer with its defaults, and the same recipe."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.model = load_model(MODEL)
        freeze_vision(self.model, True)

    def steps(self, items: list[dict]) -> None:
        arguments = TrainingArguments(
            output_dir=str(self.work),
            per_device_train_batch_size=BATCH,
            max_steps=len(items) // BATCH,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=1.0,
            optim="adamw_torch",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=1,
        )
        Trainer(self.model, arguments, data_collator=padded, train_dataset=items).train()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sft_pack", description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", type=int, default=1024, help="tokens of a packed row")
    parser.add_argument("--out", help="write the result there as JSON")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="paravt-bench-") as folder:
        result = measure(Path(folder), chosen.steps, chosen.rounds, chosen.row)
    print(json.dumps(result, indent=1))
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path, steps: int, rounds: int, row: int) -> dict:
    made = conversations(folder / "needles", steps * BATCH)
    batches = [made[i * BATCH : (i + 1) * BATCH] for i in range(steps)]
    items = [item(conversation) for conversation in made]
    tokens = sum(conversation.sampled_count for conversation in made)
    lengths = [len(conversation.ids) for conversation in made]
    packed, plain = Packed(folder / "packed", steps * (rounds + 1), row), Padded(folder / "padded")
    packed.steps(0, batches[:1])  # warm up
    plain.steps(items[:BATCH])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CLOCKS}
    for number in range(rounds):
        started = clocks()
        packed.steps(1 + number * steps, batches)
        between = clocks()
        plain.steps(items)
        ended = clocks()
        for name in CLOCKS:
            ours, theirs = between[name] - started[name], ended[name] - between[name]
            runs[name].append({"packed": tokens / ours, "padded": tokens / theirs, "ratio": theirs / ours})
        print(json.dumps({name: runs[name][-1] for name in CLOCKS}), flush=True)
    return {
        **{
            name: {what: statistics.median(run[what] for run in rounds) for what in rounds[0]}
            for name, rounds in runs.items()
        },
        "rounds": runs,
        "samples_per_step": BATCH,
        "row_tokens": row,
        "sample_tokens": {
            "mean": statistics.mean(lengths),
            "longest": max(lengths),
            "shortest": min(lengths),
        },
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
