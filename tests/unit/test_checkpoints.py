"""Checkpoints: whole or absent, numeric order, broken ones passed over, a full disk said in a sentence."""

import json
import logging
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from paravt import checkpoints
from paravt.checkpoints import CheckpointError


def writer(text: str = "weights"):
    def write(folder: Path) -> None:
        (folder / "state.bin").write_text(text)

    return write


def save(root: Path, step: int, keep: int = 9, text: str = "weights"):
    return checkpoints.save(root, step, writer(text), keep)


def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    for step in (2, 10, 9, 100):
        save(tmp_path, step)
    assert [found.step for found in checkpoints.finished(tmp_path)] == [2, 9, 10, 100]
    assert checkpoints.latest(tmp_path).folder == tmp_path / "step-100"


def test_nothing_there_is_none(tmp_path):
    assert checkpoints.latest(tmp_path / "missing") is None
    assert checkpoints.latest(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_the_marker_names_each_file_with_its_size(tmp_path):
    save(tmp_path, 3, text="12345")
    assert json.loads((tmp_path / "step-3" / "complete.json").read_text()) == {"state.bin": 5}


def break_marker(folder: Path) -> None:
    (folder / "complete.json").unlink()


def break_marker_text(folder: Path) -> None:
    (folder / "complete.json").write_text('{"state.bin"')


def break_size(folder: Path) -> None:
    (folder / "state.bin").write_text("weig")


def break_file(folder: Path) -> None:
    (folder / "state.bin").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (break_marker, "never finished"),
        (break_marker_text, "cannot be read"),
        (break_size, "has 4 bytes, not 7"),
        (break_file, "state.bin is missing"),
    ],
)
def test_a_broken_folder_is_passed_over_with_a_sentence_and_not_counted(tmp_path, caplog, harm, words):
    for step in (4, 5, 6):
        save(tmp_path, step)
    harm(tmp_path / "step-6")
    with caplog.at_level(logging.WARNING, "paravt"):
        assert checkpoints.latest(tmp_path).step == 5
    assert words in caplog.text and "step-6" in caplog.text
    save(tmp_path, 7, keep=2)
    assert [found.step for found in checkpoints.finished(tmp_path)] == [5, 7]  # 6 takes no place


def test_other_files_and_folders_are_no_checkpoints(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-9").write_text("a file")
    (tmp_path / "step-8x").mkdir()
    assert checkpoints.latest(tmp_path).step == 1


def test_a_broken_folder_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 4)
    break_size(tmp_path / "step-4")
    save(tmp_path, 4, text="new")
    assert (checkpoints.latest(tmp_path).folder / "state.bin").read_text() == "new"


def test_what_a_killed_save_left_is_ignored_and_cleared(tmp_path):
    save(tmp_path, 1)
    left = tmp_path / ".writing-step-2"
    left.mkdir()
    (left / "state.bin").write_text("half")
    assert checkpoints.latest(tmp_path).step == 1
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_a_full_disk_is_one_sentence_and_keeps_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)

    def write(folder: Path) -> None:
        (folder / "state.bin").symlink_to("/dev/full")
        (folder / "state.bin").write_text("x" * 10)

    with pytest.raises(CheckpointError, match="the disk is full; the one of step 1 is kept") as caught:
        checkpoints.save(tmp_path, 2, write, keep=1)
    assert "\n" not in str(caught.value) and "step 2" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_that_fills_while_tensors_are_written_is_said_too(tmp_path):
    def write(folder: Path) -> None:
        (folder / "state.pt").symlink_to("/dev/full")
        checkpoints.save_tensors(folder / "state.pt", {"weight": torch.zeros(10_000)})

    with pytest.raises(CheckpointError, match="the disk is full; there is no earlier one"):
        checkpoints.save(tmp_path, 2, write, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_published_folder_is_whole_or_absent(tmp_path, monkeypatch):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        checkpoints.publish(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []
    checkpoints.publish(tmp_path / "model", writer("one"))
    checkpoints.publish(tmp_path / "model", writer("two"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["state.bin"]
    rename = Path.rename

    def busy(self: Path, target: Path) -> Path:
        if target.name == "model" and self.name == ".writing-model":
            raise OSError(16, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(OSError, match="busy"):
        checkpoints.publish(tmp_path / "model", writer("three"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "state.bin").read_text() == "two"


def test_tensors_and_plain_data_come_back_as_they_were(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "pair": (1, 2.5), "counts": {"a": 1}}
    checkpoints.save_tensors(tmp_path / "state.pt", state)
    back = checkpoints.load_tensors(tmp_path / "state.pt")
    assert torch.equal(back.pop("w"), state.pop("w"))
    assert back == state


def test_generators_go_on_where_they_stood(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves half of a pair inside the generator
    checkpoints.save_tensors(tmp_path / "random.pt", checkpoints.random_state())
    first = draw()
    assert draw() != first
    checkpoints.restore_random_state(checkpoints.load_tensors(tmp_path / "random.pt"))
    assert draw() == first


SAVER = """
import sys
from pathlib import Path
from paravt import checkpoints
def write(folder):
    for part in range(20):
        (folder / f"part-{part}").write_bytes(bytes(20_000))
step = 0
while True:
    step += 1
    checkpoints.save(sys.argv[1], step, write, keep=2)
    print(step, flush=True)
"""


@pytest.mark.lifecycle
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    moments = random.Random(7)
    for round_number in range(6):
        root = tmp_path / str(round_number)
        command = [sys.executable, "-c", SAVER, str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline().strip() == "1"
            time.sleep(moments.uniform(0.0, 0.1))
            os.kill(process.pid, signal.SIGKILL)
            said = [1, *(int(line) for line in process.stdout)]
        found = checkpoints.latest(root)
        assert found.step >= said[-1]  # what was reported as saved is there
        assert len(list(found.folder.glob("part-*"))) == 20
        assert (
            len(checkpoints.finished(root)) <= 3
        )  # a kill between the rename and the clearing leaves one more
