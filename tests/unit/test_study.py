import json
from pathlib import Path

import pytest

from paravt.benchmarks.results import Result
from stages import figures
from stages.params import ParamsError
from stages.study.arms import Study, read_study
from stages.study.findings import (
    CALLS_IN_TRAINING,
    FORMAT_IN_TRAINING,
    difference_of,
    findings,
    interval_of,
    paired,
)
from stages.study.record import Record, from_json, read_records, to_json, write_record
from stages.study.report import _smoothed, build, gather
from tests.repository import ROOT

COMPLIANCE, CALLS = figures.compliance(1.0), figures.tool_calls(1.0)


def result(place: int, temperature: float, **values) -> Result:
    fields = {"status": "answered", "score": 1.0, "format": 1.0, "compliant": True, "calls": 1} | values
    kind = "tvg" if place % 4 == 2 else "mcq"
    return Result(key="", id=f"q{place}", question_type=kind, budget=4, temperature=temperature, **fields)


def record(arm: str, seed: int, good: int, calls: int = 1, trained: bool = True) -> Record:
    """Of 40 sampled episodes `good` are compliant; 40 greedy answers are right in as many."""
    greedy = [result(i, 0.0, score=float(i < good)) for i in range(40)]
    sampled = [result(i, 1.0, compliant=i < good, format=float(i < good), calls=calls) for i in range(40)]
    curves = {"reward/format": [good / 40, good / 40], "calls/run": [calls, None]} if trained else {}
    return Record(arm, seed, (f"method={arm}",), tuple(greedy + sampled), curves)


def runs() -> dict[str, list[Record]]:
    return {
        "base": [record("base", 1, 5, trained=False)],
        "sft": [record("sft", 1, 20, calls=2, trained=False)],
        "vanilla_grpo": [record("vanilla_grpo", seed, 20 + seed, calls=0) for seed in (1, 2, 3)],
        "para_grpo": [record("para_grpo", seed, 36 + seed % 2, calls=2) for seed in (1, 2)],
    }


def test_a_record_is_the_same_after_it_was_written_and_read(tmp_path):
    odd = result(3, 1.0, status="failed", score=None, format=None, compliant=None, calls=None)
    kept = record("para_grpo", 2, 7)
    kept = Record(kept.arm, kept.seed, kept.overrides, (*kept.results, odd), kept.curves)
    write_record(tmp_path / "para_grpo-2.json", kept)
    assert read_records(tmp_path) == [kept]
    assert to_json(from_json(to_json(kept))) == to_json(kept)
    assert list(tmp_path.iterdir()) == [tmp_path / "para_grpo-2.json"]


def test_a_record_keeps_whole_numbers_short_and_fractions_to_six_digits():
    data = to_json(Record("a", 1, (), (result(0, 0.0, score=1 / 3), result(1, 0.0)), {"reward/total": [2.0]}))
    assert data["asked"][0]["score"] == [0.333333, 1] and data["asked"][0]["compliant"] == [1, 1]
    assert data["curves"] == {"reward/total": [2]}
    assert data["types"] == ["mcq", "mcq"] and data["ids"] == ["q0", "q1"]


def test_a_file_that_is_no_record_is_named(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"arm": "a"}))
    with pytest.raises(ValueError, match=r"x\.json is no result of the study \('asked'\)"):
        read_records(tmp_path)


def test_runs_are_paired_by_seed_and_a_start_stands_beside_each():
    found = runs()
    assert [(a.seed, b.seed) for a, b in paired(found["vanilla_grpo"], found["para_grpo"])] == [
        (1, 1),
        (2, 2),
    ]
    assert [(a.arm, b.seed) for a, b in paired(found["sft"], found["vanilla_grpo"])] == [
        ("sft", 1),
        ("sft", 2),
        ("sft", 3),
    ]
    assert [(a.arm, b.arm) for a, b in paired(found["base"], found["sft"])] == [("base", "sft")]
    assert paired([], found["sft"]) == [] and paired(found["sft"], []) == []


def test_differences_are_the_means_of_what_is_paired():
    found = runs()
    gap = difference_of(COMPLIANCE, found["vanilla_grpo"], found["para_grpo"])
    assert gap.by_seed == pytest.approx((16 / 40, 14 / 40)) and gap.mean == pytest.approx(15 / 40)
    assert gap.low > 0 and gap.clear
    trained = difference_of(FORMAT_IN_TRAINING, found["vanilla_grpo"], found["para_grpo"])
    assert trained.mean == pytest.approx(15 / 40) and trained.questions == 1
    assert difference_of(FORMAT_IN_TRAINING, found["sft"], found["para_grpo"]) is None
    assert interval_of(CALLS_IN_TRAINING, found["para_grpo"]).mean == 2.0
    assert interval_of(COMPLIANCE, found["sft"]).mean == pytest.approx(0.5)
    assert interval_of(FORMAT_IN_TRAINING, found["sft"]).mean is None


def test_verdicts():
    found = {
        item.says: item
        for item in findings(runs(), lambda k: figures.accuracy(k, "all"), COMPLIANCE, CALLS, [4])
    }
    assert found["SFT raises format over the base"].verdict == "holds"
    assert found["vanilla GRPO makes the tool die out"].verdict == "holds"
    assert found["PARA-GRPO has better format than vanilla GRPO"].verdict == "holds"
    assert found["PARA-GRPO answers better than vanilla GRPO, K = 4"].verdict == "holds"
    assert found["gating alone calls the tool more than vanilla GRPO"].verdict == "not run"
    assert found["vanilla GRPO leaves format where SFT had it"].verdict == "no difference seen"
    turned = runs()
    turned["para_grpo"], turned["vanilla_grpo"] = turned["vanilla_grpo"], turned["para_grpo"]
    again = findings(turned, lambda k: figures.accuracy(k, "all"), COMPLIANCE, CALLS, [4])
    verdicts = {item.says: item.verdict for item in again}
    assert verdicts["PARA-GRPO has better format than vanilla GRPO"] == "the opposite is seen"
    assert verdicts["vanilla GRPO leaves format where SFT had it"] == "a difference is seen"


def test_the_report_shows_what_was_run_and_says_what_was_not():
    study = read_study(ROOT)
    blocks, numbers = build(study, runs())
    assert "Training seeds: vanilla GRPO (1, 2 and 3); PARA-GRPO (1 and 2)." in blocks[1].text
    assert numbers["arms"]["para_grpo"]["seeds"] == [1, 2]
    assert numbers["arms"]["para_grpo"]["compliance_t1"]["mean"] == pytest.approx(36.5 / 40)
    verdicts = {item["says"]: item["verdict"] for item in numbers["findings"]}
    assert verdicts["without the tool reward the tool is called less"] == "not run"
    rows = next(block for block in blocks if getattr(block, "header", [""])[:2] == ["", "f_tau"]).rows
    assert rows[2] == ["vanilla GRPO", "0.13", "0.02", "62.0", "68.6", "39.3", "64.5", "0.55", "0.00", "55.0"]
    assert rows[4][-3:] == ["–"] * 3  # anchoring only was not run
    assert build(study, runs())[1] == numbers


def test_curves_are_means_over_seeds_and_the_last_steps():
    assert _smoothed([[1, 2, None], [3, None, 5]], width=2) == [(1.0, 2.0), (2.0, 2.0), (3.0, 3.5)]
    assert _smoothed([]) == []


def test_runs_of_arms_that_the_study_dropped_are_named(tmp_path, capsys):
    for item in (record("para_grpo", 1, 3), record("para_grpo", 9, 3), record("old", 1, 3)):
        write_record(tmp_path / f"{item.arm}-{item.seed}.json", item)
    assert {name: [r.seed for r in kept] for name, kept in gather(read_study(ROOT), tmp_path).items()} == {
        "para_grpo": [1]
    }
    said = capsys.readouterr().err
    assert "old, seed 1" in said and "para_grpo, seed 9" in said


def test_every_arm_of_the_study_can_be_run_and_differs_from_para_grpo():
    study = read_study(ROOT)
    plain = study.params("para_grpo", 1).model_dump(exclude={"method"})
    for name, arm in study.arms.items():
        if arm.trained:
            params = study.params(name, 3)
            assert params.seed == 3 and params.scale == study.scale
            changed = study.params(name, 1).model_dump(exclude={"method"}) != plain
            assert changed or arm.start.name != "sft" or name == "para_grpo"
    assert study.arm("weak_prior_para").start == Path("study/starts/weak_prior")
    assert not study.arm("weak_prior").trained and study.bases["weak_prior"].tool_share == 0.0
    assert study.params("no_tool_reward", 1).reward.tool == "off"
    assert study.params("scope_sequence", 1).anchoring.scope == "sequence"
    with pytest.raises(ParamsError, match="has no arm 'nothing'; it has base, sft, strict"):
        study.arm("nothing")


def test_seeds_of_the_study_are_those_of_its_pipeline():
    from flows.study import GROUPS, runs_of

    study: Study = read_study(ROOT)
    names = runs_of(ROOT, GROUPS)
    assert names[:2] == ["start@base", "start@sft"]
    by_group = {
        group: {name.split("@")[1] for name in names if name.startswith(f"{group}@")} for group in GROUPS
    }
    assert by_group["base"] == by_group["other_start"] == set(study.bases)
    assert by_group["main"] | by_group["variants"] | by_group["other_bases"] == {
        f"{name}-{seed}" for name, arm in study.arms.items() if arm.trained for seed in study.seeds[name]
    }
    assert [name.split("@")[0] for name in names] == sorted(
        (name.split("@")[0] for name in names), key=GROUPS.index
    )
    first = [name for name in names if name.startswith("main@")][:4]
    assert {name.rpartition("-")[2] for name in first} == {
        "1"
    }  # all arms of a seed come before the next seed


def test_other_bases_are_shown_once_both_arms_have_run():
    study = read_study(ROOT)
    found = runs() | {
        "strict": [record("strict", 1, 30, trained=False)],
        "strict_vanilla": [record("strict_vanilla", 1, 30)],
    }
    assert not any(getattr(block, "text", "") == "Other bases" for block in build(study, found)[0])
    found["strict_para"] = [record("strict_para", 1, 38)]
    blocks, _ = build(study, found)
    table = blocks[-1]
    assert [row[0] for row in table.rows] == ["SFT", "SFT from a strict base"]
    assert table.rows[1][1].startswith("+20.0 [")
