"""How a stage becomes several processes, and what those that are not the first report."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML
import torch

from paravt.config import TrainConfig
from stages import launch
from stages.params import ROOT


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that a process would have become."""
    commands: list[list[str]] = []
    monkeypatch.delenv(launch.STARTED, raising=False)
    monkeypatch.setattr(launch.os, "execv", lambda path, command: commands.append(list(command)))
    return commands


def test_one_process_starts_nothing_and_a_started_one_neither(started, monkeypatch):
    launch.spread("stages.sft", TrainConfig(), 1)
    monkeypatch.setenv(launch.STARTED, "0")
    launch.spread("stages.sft", TrainConfig(), 4)
    assert started == []


@pytest.mark.parametrize(("sharding", "layout"), [("none", "replicated"), ("fsdp2", "fsdp2")])
def test_several_are_started_by_accelerate_with_their_layout(started, monkeypatch, sharding, layout):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    launch.spread("stages.sft", TrainConfig(sharding=sharding), 4)
    [command] = started
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert command[-2:] == ["-m", "stages.sft"]
    assert command[command.index("--num_processes") + 1] == "4"
    config = YAML(typ="safe").load(Path(command[4]).read_text())
    assert (config["distributed_type"] == "FSDP") == (sharding == "fsdp2")
    assert Path(command[4]) == ROOT / "conf" / "accelerate" / f"{layout}.yaml"
    assert launch.os.environ["ACCELERATE_USE_CPU"] == "true"


def test_more_processes_than_gpus_are_refused(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="asks for 8 GPUs and there are 2"):
        launch.spread("stages.para_grpo", TrainConfig(), 8)
    assert started == []


def test_the_layer_that_is_split_is_a_class_of_the_model():
    config = YAML(typ="safe").load((ROOT / "conf" / "accelerate" / "fsdp2.yaml").read_text())
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    name = config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
    assert issubclass(getattr(modeling_qwen3_vl, name), torch.nn.Module)
    assert config["fsdp_config"]["fsdp_version"] == 2
