"""What several processes must compute as one does: SFT and GRPO in float64, on the training world.

`python -m tests.parallel_world FOLDER NAME [BEGUN...]` trains in FOLDER/NAME and writes, from its first
process, what came out: metrics, gradients of the first step, weights. Started by accelerate it shares the
work; alone it does all. FOLDER must hold `base` (a model) and the clips.
"""

from __future__ import annotations

from pathlib import Path
import shutil
import sys

import torch
from torch.distributed.tensor import DTensor

from paravt.config import AnchoringConfig, TrainConfig
from paravt.export import export_weights, write_model_folder
from paravt.grpo import train as train_grpo
from paravt.model import load_encoder, load_model
from paravt.parallel import is_first, tell
from paravt.reporter import LogReporter
from paravt.sft import train as train_sft
from paravt.training import TrainingRun
from tests.fakes import ScriptedEngine
from tests.tiny import VISUAL
from tests.training_world import CALL, grpo_setup, loose_traces, question, sft_setup

STEPS = 4
REPLIES = (
    "look\n</think>\n<answer>A</answer>",
    "look\n<answer>A</answer>",
    "look\n</think>\n<answer>B</answer>",
)


class Gradients:
    """Gradients as they are when a step is about to be taken, whole, from each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self._update = TrainingRun.update

    def __enter__(self) -> Gradients:
        def update(run: TrainingRun, *arguments):
            found = {}
            for name, weight in run.model.named_parameters():
                if weight.grad is not None:
                    gradient = weight.grad
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    found[name] = whole.clone()
            self.steps.append(found)
            return self._update(run, *arguments)

        TrainingRun.update = update
        return self

    def __exit__(self, *_) -> None:
        TrainingRun.update = self._update


def reply(prompt) -> str:
    """Answers that differ over the episodes of a group and need nothing of the weights."""
    if prompt.is_subagent:
        return "a red circle"
    if prompt.turn == 0 and prompt.sample % 4 == 3:
        return f"look\n</think>\n{CALL}"
    return REPLIES[prompt.sample % 3]


class Scripted(ScriptedEngine):
    """A server's stand-in: it takes folders and has no model of this process."""

    def load_weights(self, folder: str, version: int) -> None:
        assert load_model(folder).config.text_config.hidden_size == 32
        super().load_weights(folder, version)


class InMemory(Scripted):
    """The same of a server that is sent tensors: the first process alone has them whole."""

    takes_tensors = True

    def load_tensors(self, tensors, version: int) -> None:
        assert tensors["model.language_model.embed_tokens.weight"].shape[1] == 32
        assert not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        self.weight_version = version


def write(folder: Path, scratch: Path, gradients: Gradients, model) -> None:
    """Everything to compare, by the first process."""
    weights = export_weights(model) or model.state_dict()
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"gradients": gradients.steps, "weights": weights}, folder / "result.pt")
        (folder / "metrics.jsonl").write_bytes((scratch / "metrics.jsonl").read_bytes())


def sft(folder: Path, target: Path, train: TrainConfig, **changes) -> None:
    model = load_model(folder / "base", torch.float64)
    encoder = load_encoder(folder / "base", VISUAL)
    setup = sft_setup(steps=STEPS, batch_size=5, micro_batch_tokens=300, save_every=2, **changes)
    setup = type(setup)(setup.seed, setup.episode, setup.sft, train)
    with Gradients() as gradients:
        train_sft(model, encoder, loose_traces(), setup, LogReporter(), target / "scratch", folder)
    write(target, target / "scratch", gradients, model)
    write_model_folder(model, folder / "base", target / "model")


def grpo(folder: Path, target: Path, train: TrainConfig, only_first: bool = False, **changes) -> None:
    model = load_model(folder / "base", torch.float64)
    encoder = load_encoder(folder / "base", VISUAL)
    # the script's log-probs are made up: a ratio to them would hide all gradients
    sizes = {"steps": STEPS, "prompts_per_step": 3, "micro_batch_tokens": 300, "save_every": 2}
    setup = grpo_setup(importance="off", **sizes, **changes)
    setup = type(setup)(**vars(setup) | {"train": train, "anchoring": AnchoringConfig()})
    kind = InMemory if only_first else Scripted
    engine = None if only_first and not is_first() else kind(encoder, reply)
    samples = [question(number) for number in range(4)]
    with Gradients() as gradients:
        train_grpo(
            model, None, engine, encoder, samples, setup, LogReporter(), target / "scratch", video_root=folder
        )
    write(target, target / "scratch", gradients, model)


def half_done(source: Path, target: Path) -> None:
    """A scratch folder as a run leaves it that was killed after its first checkpoint."""
    if is_first():
        shutil.copytree(source / "scratch" / "step-2", target / "scratch" / "step-2")


def main(folder: Path, name: str, *begun: str) -> None:
    """All runs under one launch, since starting processes costs more than training here.

    `begun` names layouts whose runs are gone on with from the middle.
    """
    target, plain = folder / name, TrainConfig()
    for frozen in (True, False):
        word = "frozen" if frozen else "all"
        sft(folder, target / f"sft-{word}", plain, freeze_vision=frozen)
        grpo(folder, target / f"grpo-{word}", plain, freeze_vision=frozen)
    sft(folder, target / "sft-packed", plain, packing=True, freeze_vision=False)
    sft(folder, target / "sft-checkpointing", TrainConfig(gradient_checkpointing=True), freeze_vision=True)
    grpo(folder, target / "grpo-dealt", plain, only_first=True, freeze_vision=True)
    resume(folder, name, *begun)


def resume(folder: Path, name: str, *begun: str) -> None:
    for layout in begun:
        for run, again in (("sft-frozen", sft), ("grpo-frozen", grpo)):
            target = folder / f"{layout}-{name}" / run
            half_done(folder / layout / run, target)
            tell()  # the folder is there
            again(folder, target, TrainConfig(), freeze_vision=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
