"""The TRL side of bench/grpo_step.py, run by the interpreter of `.venv-bench`; nothing of this project in it.

    .venv-bench/bin/python bench/grpo_trl.py FOLDER

FOLDER/work.json says what to do, FOLDER/*.png are the frames; writes FOLDER/trl.json.
"""

from __future__ import annotations

import json
from pathlib import Path
import resource
import sys
import time

from datasets import Dataset
from PIL import Image
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rss_gib() -> float:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rows(folder: Path, prompts: list[dict]) -> Dataset:
    """Conversations whose user turn has frames and texts in turn, and the frames beside it."""
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": [{"type": "text", "text": prompt["system"]}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "image"} if part is None else {"type": "text", "text": part}
                            for part in prompt["parts"]
                        ],
                    },
                ],
                "images": [Image.open(folder / name).convert("RGB") for name in prompt["frames"]],
            }
            for prompt in prompts
        ]
    )


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **_):
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self._began)


class Timed(GRPOTrainer):
    """Also counts the tokens that carry loss, the time of generation, and prompts unlike ours."""

    def __init__(self, *args, wanted: list[list[int]], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.wanted = {tuple(ids) for ids in wanted}
        self.tokens: list[int] = []
        self.generation_s: list[float] = []

    def _generate(self, prompts):
        began = time.perf_counter()
        made = super()._generate(prompts)
        self.generation_s.append(time.perf_counter() - began)
        for ids in made[0]:
            if tuple(ids) not in self.wanted:
                raise RuntimeError("TRL's prompt is not ours; the two would not do the same work")
        self.tokens.append(sum(len(ids) for ids in made[1]))
        return made


def main() -> int:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    torch.set_num_threads(work["threads"])
    model = Qwen3VLForConditionalGeneration.from_pretrained(work["model"], dtype=torch.float32)
    model.model.visual.requires_grad_(False)  # as ours
    processor = AutoProcessor.from_pretrained(work["model"])
    clock = Clock()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=work["steps"],
        per_device_train_batch_size=work["batch"],
        gradient_accumulation_steps=work["prompts"] * work["group"] // work["batch"],
        num_generations=work["group"],
        max_completion_length=work["new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=work["kl_weight"],
        learning_rate=work["learning_rate"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=work["seed"],
    )
    trainer = Timed(
        model=model,
        processing_class=processor,
        args=settings,
        train_dataset=rows(folder, work["items"]),
        reward_funcs=lambda completions, **_: [len(turn[0]["content"]) / 100 for turn in completions],
        callbacks=[clock],
        wanted=[item["ids"] for item in work["items"]],
    )
    before = rss_gib()
    trainer.train()
    result = {
        "seconds": clock.seconds,
        "tokens": trainer.tokens,
        "rollout_s": trainer.generation_s,
        "peak_gib": peak_gib(),
        "before_gib": before,
    }
    (folder / "trl.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
