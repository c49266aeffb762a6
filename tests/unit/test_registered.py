"""A registered model is asked again: its own weights and data, and a fall is said and kept."""

from __future__ import annotations

from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from stages import registered as command
from stages.candidate import RegistryError, candidate
from stages.definition import dvc_hash
from stages.registered import bring
from stages.registry import CHAMPION, promote
from tests.unit.test_registry import checkout, make, results, trained

__all__ = ["checkout"]


@pytest.fixture
def champion(checkout: Path):
    """Version 1, whose weights and data lie in DVC's cache and no longer in the checkout."""
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, cwd=checkout, check=True, timeout=60)
    (checkout / "data/needles").mkdir()
    (checkout / "data/needles/eval.jsonl").write_text("needles\n")
    trained(checkout, "one", dvc_hash(checkout / "data/needles"), sft=30, para_grpo=45)
    paths = ("data/needles", "data/prepared")
    registry = make(checkout)
    assert promote(registry, candidate(checkout, "para_grpo"), {}).champion == "1"
    (checkout / "dvc.lock").unlink()
    words = [sys.executable, "-m", "dvc", "add", "-q", "models/para_grpo", *paths]
    subprocess.run(words, cwd=checkout, check=True, timeout=60)
    for path in ("models/para_grpo", *paths):
        shutil.rmtree(checkout / path)
        (checkout / f"{path}.dvc").unlink()
    return registry


def test_weights_and_data_come_back_by_their_hashes(checkout, champion):
    version = champion.get(CHAMPION)
    for _ in range(2):  # what is there already is taken
        bring(version, checkout)
        assert (checkout / "models/registered/model.safetensors").read_text() == "para_grpo one"
        assert (checkout / "data/needles/eval.jsonl").read_text() == "needles\n"
        assert (checkout / "data/prepared/eval.jsonl").read_text() == '{"id": "q0"}\n'
    assert not list(checkout.rglob("fetched-*"))

    (checkout / "data/needles/eval.jsonl").write_text("other questions\n")
    with pytest.raises(RegistryError, match="data/needles is not what version 1 was evaluated on"):
        bring(version, checkout)
    assert (checkout / "data/needles/eval.jsonl").read_text() == "other questions\n"


@pytest.mark.parametrize(
    ("right", "code", "words"), [(45, 0, "not worse beyond noise"), (20, 3, "worse beyond")]
)
def test_what_is_found_stands_on_the_version(checkout, champion, monkeypatch, capsys, right, code, words):
    asked = []

    def evaluate_into(target, name, model, benchmark, params, reporter):
        asked.append((target, name, model, benchmark.name))
        return results(right)

    monkeypatch.setattr(command, "evaluate_into", evaluate_into)
    assert command.main(["champion"]) == code
    assert asked == [(Path("reports/registered"), "registered", Path("models/registered"), "needles")]
    assert f"registered: paravt-smoke 1: {words}" in capsys.readouterr().out
    tags = champion.get(CHAMPION).tags
    assert tags["evaluation.reason"].startswith(words) and tags["promotion.decision"] == "promoted"
    run = champion.client.get_run(tags["evaluation.run"])
    assert run.data.tags["registered.version"] == "1" and run.info.status == "FINISHED"


def test_without_a_champion_it_says_so(checkout, capsys):
    with pytest.raises(SystemExit, match="1"):
        command.main([])
    assert "registered: paravt-smoke has no champion" in capsys.readouterr().err
