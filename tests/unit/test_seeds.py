"""The table over seeds: what it says of known results, and that params.yaml survives whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import seeds
from paravt.benchmarks.results import Result, read_results, write_results
from stages.params import compose, dump, load


def run(compliant: dict[str, float]) -> dict[str, list]:
    """Sixteen questions a model; the first `share` of them are compliant and right."""
    made = {}
    for name, share in compliant.items():
        good = round(16 * share)
        made[name] = [
            Result(
                f"{name}{temperature}{number}",
                f"q{number}",
                "mcq",
                4,
                temperature,
                "answered",
                score=float(number < good),
                compliant=number < good,
                format=1.0,
                calls=1,
            )
            for temperature in (0.0, 1.0)
            for number in range(16)
        ]
    return made


def test_a_claim_is_shown_only_if_all_seeds_agree():
    agree = [
        run({"base": 0.0, "sft": 0.75, "para_grpo": 1.0}),
        run({"base": 0.125, "sft": 1.0, "para_grpo": 1.0}),
    ]
    text, numbers = seeds.summarise([1, 2], agree, ["Scale `tiny`"])
    assert numbers["claims"]["sft_compliance_t1"]["verdict"] == "shown"
    assert numbers["means"]["1"]["sft"]["compliance_t1"] == 0.75
    assert numbers["means"]["2"]["base"]["compliance_t1"] == 0.125
    assert "| SFT is above base in format compliance at temperature 1 | +75.0 | +87.5 |" in text
    differ = [agree[0], run({"base": 1.0, "sft": 0.9375, "para_grpo": 1.0})]
    _, numbers = seeds.summarise([1, 2], differ, [])
    assert numbers["claims"]["sft_compliance_t1"]["verdict"] == "not shown"


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch) -> Path:
    """A folder in which a pipeline run is a function that writes results."""
    (tmp_path / "params.yaml").write_text("# mine\n" + dump(compose(["scale=smoke"])))

    def repro(root: Path) -> int:
        seed = load(root / "params.yaml").seed
        if seed == 3:
            return 255
        for name, found in run({"base": 0.0, "sft": 0.5, "para_grpo": 1.0}).items():
            folder = root / "reports" / "evaluate" / name
            folder.mkdir(parents=True, exist_ok=True)
            write_results(folder / "results.jsonl", found[:seed])
        return 0

    monkeypatch.setattr(seeds, "repro", repro)
    return tmp_path


def test_each_seed_is_run_and_kept_and_params_are_put_back(pipeline):
    before = (pipeline / "params.yaml").read_bytes()
    runs = seeds.run_seeds(pipeline, [1, 2])
    assert [len(found["sft"]) for found in runs] == [1, 2]
    assert len(read_results(pipeline / ".scratch/seeds/2/sft.jsonl")) == 2
    assert (pipeline / "params.yaml").read_bytes() == before


def test_a_seed_that_fails_ends_with_a_sentence_and_params_are_put_back(pipeline, capsys):
    before = (pipeline / "params.yaml").read_bytes()
    with pytest.raises(SystemExit) as end:
        seeds.run_seeds(pipeline, [1, 3])
    assert end.value.code == 255
    assert "seeds: seed 3 failed; run again to go on with it" in capsys.readouterr().err
    assert (pipeline / "params.yaml").read_bytes() == before


def test_settings_say_what_was_changed(pipeline):
    text = (pipeline / "params.yaml").read_text()
    (pipeline / "params.yaml").write_text(text.replace("kl_weight: 0.01", "kl_weight: 0.5"))
    assert seeds.settings(pipeline) == ["Scale `smoke`, method `para_grpo`", "changed: grpo.kl_weight 0.5"]
