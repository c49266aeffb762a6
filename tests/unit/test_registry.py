"""A champion is replaced only by what is better on the same questions; each decision has its reason."""

from __future__ import annotations

import json
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from paravt.benchmarks.results import Result, write_results
from stages import registry as command
from stages.candidate import START, RegistryError, candidate
from stages.definition import dvc_hash
from stages.params import compose, dump
from stages.promotion import decide, stands
from stages.registry import CANDIDATE, CHAMPION, Registry, promote
from stages.tracking import Target

COUNT = 60


def results(right: int, compliant: int = COUNT, budgets: tuple[int, ...] = (4, 8)) -> list[Result]:
    """The first `right` questions answered well at each budget; `compliant` episodes at temperature 1."""
    asked = [(0.0, budget) for budget in budgets] + [(1.0, 4)]
    return [
        Result(
            f"{temperature}-{budget}-{number}",
            f"q{number}",
            "mcq",
            budget,
            temperature,
            "answered",
            score=float(number < right),
            compliant=bool(temperature == 0 or number < compliant),
            format=1.0,
            calls=1,
        )
        for temperature, budget in asked
        for number in range(COUNT)
    ]


def test_better_beyond_noise_is_better():
    found = decide(results(50), results(30))
    assert found.better and found.gain.mean == pytest.approx(20 / COUNT) and found.gain.low > 0
    assert "greedy accuracy 0.833 against 0.500, +0.333 [" in found.reason
    assert found.reason.endswith("over 60 questions at K = 4, 8")


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (results(31), results(30), "not better beyond noise: greedy accuracy 0.517 against 0.500"),
        (results(30), results(50), "not better beyond noise"),
        (results(50, compliant=20), results(30), "worse in format compliance, temperature 1, -0.667"),
        (results(50), results(30, budgets=(16,)), "no question and frame budget in common"),
        ([], results(30), "no question and frame budget in common"),
    ],
)
def test_what_is_not_better_is_refused_with_a_reason(mine, theirs, why):
    found = decide(mine, theirs)
    assert not found.better and why in found.reason


def test_one_budget_in_common_is_enough():
    assert decide(results(50, budgets=(4, 16)), results(30, budgets=(2, 4))).better


def test_a_model_that_is_asked_again_stands_unless_it_is_worse_beyond_noise():
    assert stands(results(30), results(30)) == (
        True,
        "not worse beyond noise than it was: greedy accuracy 0.500 against 0.500, +0.000 [+0.000, +0.000] "
        "over 60 questions at K = 4, 8",
    )
    assert stands(results(29), results(30))[0] and stands(results(50), results(30))[0]
    good, words = stands(results(30), results(50))
    assert not good and "worse beyond noise than it was: greedy accuracy 0.500 against 0.833" in words
    good, words = stands(results(30, compliant=20), results(30))
    assert not good and words.startswith("worse in format compliance, temperature 1, -0.667 [")
    assert stands([], results(30)) == (
        None,
        "no question and frame budget in common, so nothing can be compared",
    )


@pytest.fixture
def checkout(project: Path) -> Path:
    (project / "params.yaml").write_text(dump(compose(["scale=smoke"])))
    (project / "data/prepared").mkdir(parents=True)
    (project / "data/prepared/eval.jsonl").write_text('{"id": "q0"}\n')
    return project


def trained(
    root: Path, weights: str, needles: str = "0" * 32 + ".dir", pixels: int = 784, **right: int
) -> None:
    """Models, evaluations and the dvc.lock of a pipeline whose models answered `right` questions well.

    `needles` is the hash of the videos under the questions, `pixels` those of a frame.
    """
    lock = {}
    for name, count in right.items():
        model, report = root / "models" / name, root / "reports/evaluate" / name
        for folder in (model, report):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (model / "model.safetensors").write_text(f"{name} {weights}")
        write_results(report / "results.jsonl", results(count))
        model_out = {"path": f"models/{name}", "md5": dvc_hash(model)}
        start = lock.get(START[name], {}).get("outs", [])  # what it was trained from
        lock[name] = {"cmd": name, "deps": start, "outs": [model_out]}
        report_out = {"path": f"reports/evaluate/{name}", "md5": dvc_hash(report)}
        asked = {"path": "data/prepared", "md5": dvc_hash(root / "data/prepared")}
        shown = {"path": "data/needles", "md5": needles}
        values = {"params.yaml": {"seed": 1, "visual": {"max_pixels": pixels, "read_timeout_s": 60.0}}}
        lock[f"evaluate@{name}"] = {
            "cmd": name,
            "deps": [model_out, asked, shown],
            "params": values,
            "outs": [report_out],
        }
    (root / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": lock}))


def make(root: Path) -> Registry:
    return Registry(Target(root), "paravt-smoke")


def aliases(registry: Registry) -> dict[str, int]:
    found = registry.client.get_registered_model(registry.name).aliases
    return {name: int(version) for name, version in found.items()}


def test_from_the_first_champion_to_a_rollback(checkout, capsys):
    registry = make(checkout)
    # no champion yet: compared with the model that the training started from
    trained(checkout, "one", sft=30, para_grpo=45)
    assert command.main(["promote"]) == 0
    assert "champion; better beyond noise: greedy accuracy 0.750 against 0.500" in capsys.readouterr().out
    assert aliases(registry) == {CHAMPION: 1}
    first = registry.get(CHAMPION)
    assert first.tags["promotion.decision"] == "promoted" and first.tags["promotion.reason"].endswith("(sft)")
    assert first.tags["dvc.hash"] == dvc_hash(checkout / "models/para_grpo")
    assert (first.tags["method"], first.tags["seed"], first.tags["scale"]) == ("para_grpo", "1", "smoke")

    # a little better is no better
    trained(checkout, "two", sft=30, para_grpo=46)
    assert command.main(["promote"]) == command.REFUSED
    assert aliases(registry) == {CHAMPION: 1, CANDIDATE: 2}
    refused = registry.get(CANDIDATE)
    assert refused.tags["promotion.decision"] == "refused"
    assert "not better beyond noise" in refused.tags["promotion.reason"]
    assert refused.tags["promotion.reason"].endswith("(version 1)")

    # a person may decide against the figures, with a reason
    assert command.main(["promote", "--force", "--reason", "answers faster"]) == 0
    assert aliases(registry) == {CHAMPION: 2}
    assert registry.get(CHAMPION).tags["promotion.decision"] == "promoted by a person"

    trained(checkout, "three", sft=30, para_grpo=60)
    assert command.main(["promote"]) == 0
    assert aliases(registry) == {CHAMPION: 3}
    assert command.main(["promote"]) == 0  # it is the champion: nothing changes
    assert aliases(registry) == {CHAMPION: 3}

    # one command each step back
    assert command.main(["rollback", "--reason", "slow on long videos"]) == 0
    assert aliases(registry) == {CHAMPION: 2}
    assert command.main(["rollback"]) == 0
    assert aliases(registry) == {CHAMPION: 1}
    with pytest.raises(RegistryError, match="its first champion"):
        registry.rollback("once more")
    # what was rolled back does not come back by its old figures
    for _ in range(2):
        assert command.main(["promote"]) == command.REFUSED
        assert "was rolled back: slow on long videos" in capsys.readouterr().out
    assert command.main(["show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and shown[2].startswith(
        "paravt-smoke 1 [champion]  models/para_grpo para_grpo seed 1"
    )


def test_the_same_candidate_is_registered_once(checkout):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=30)
    versions = {registry.register(candidate(checkout, "para_grpo"), {}).version for _ in range(2)}
    assert len(versions) == 1
    assert not promote(registry, candidate(checkout, "para_grpo"), {}).decision.better


def test_other_questions_are_not_compared(checkout):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=45)
    promote(registry, candidate(checkout, "para_grpo"), {})
    (checkout / "data/prepared/eval.jsonl").write_text('{"id": "q0", "question": "another"}\n')
    trained(checkout, "two", sft=30, para_grpo=60)
    verdict = promote(registry, candidate(checkout, "para_grpo"), {})
    assert "answered other questions" in verdict.decision.reason and verdict.champion == "1"
    # the champion's weights answer the new questions, too: now they can be compared
    trained(checkout, "one", sft=30, para_grpo=40)
    assert promote(registry, candidate(checkout, "para_grpo"), {}).champion == "1"
    trained(checkout, "two", sft=30, para_grpo=60)
    verdict = promote(registry, candidate(checkout, "para_grpo"), {})
    assert "greedy accuracy 1.000 against 0.667" in verdict.decision.reason and verdict.champion == "2"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"needles": "1" * 32 + ".dir"},
            "version 1, saw other videos (tag dvc.in.data/needles); evaluate",
        ),
        ({"pixels": 1024}, "version 1, was asked with other settings of episode, visual or reward; evaluate"),
    ],
)
def test_the_same_questions_asked_otherwise_are_not_compared(checkout, change, why):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=45)
    promote(registry, candidate(checkout, "para_grpo"), {})
    trained(checkout, "two", sft=30, para_grpo=60, **change)
    verdict = promote(registry, candidate(checkout, "para_grpo"), {})
    assert why in verdict.decision.reason and verdict.champion == "1"
    # the champion's weights are asked in the same way, too: now they can be compared
    trained(checkout, "one", sft=30, para_grpo=40, **change)
    promote(registry, candidate(checkout, "para_grpo"), {})
    trained(checkout, "two", sft=30, para_grpo=60, **change)
    assert promote(registry, candidate(checkout, "para_grpo"), {}).champion == "2"


def test_neither_seed_nor_timeout_nor_temperature_is_part_of_how_it_was_asked(checkout):
    trained(checkout, "one", sft=30, para_grpo=45)
    first = candidate(checkout, "para_grpo").protocol
    lock = json.loads((checkout / "dvc.lock").read_text())
    for name in ("sft", "para_grpo"):
        values = lock["stages"][f"evaluate@{name}"]["params"]["params.yaml"]
        values |= {"seed": 2, "episode": {"temperature": 0.7}}
        values["visual"]["read_timeout_s"] = 5.0
    (checkout / "dvc.lock").write_text(json.dumps(lock))
    assert candidate(checkout, "para_grpo").protocol == first


def test_results_and_starts_of_other_questions_are_refused(checkout):
    trained(checkout, "one", sft=30, para_grpo=45)
    lock = json.loads((checkout / "dvc.lock").read_text())
    for stage, words in (
        ("evaluate@para_grpo", "reports/evaluate/para_grpo answered other questions than data/prepared"),
        ("evaluate@sft", "reports/evaluate/sft is of another models/sft or of other questions"),
    ):
        changed = json.loads(json.dumps(lock))
        changed["stages"][stage]["deps"][1]["md5"] = "0" * 32 + ".dir"
        (checkout / "dvc.lock").write_text(json.dumps(changed))
        with pytest.raises(RegistryError, match=words):
            candidate(checkout, "para_grpo")
    changed = json.loads(json.dumps(lock))
    changed["stages"]["evaluate@sft"]["params"]["params.yaml"]["visual"]["max_pixels"] = 1024
    (checkout / "dvc.lock").write_text(json.dumps(changed))
    with pytest.raises(
        RegistryError, match="or of other questions or settings; run `dvc repro evaluate@sft`"
    ):
        candidate(checkout, "para_grpo")
    changed = json.loads(json.dumps(lock))
    changed["stages"]["para_grpo"]["deps"][0]["md5"] = "0" * 32 + ".dir"  # trained from another SFT
    (checkout / "dvc.lock").write_text(json.dumps(changed))
    with pytest.raises(RegistryError, match="is of another models/sft"):
        candidate(checkout, "para_grpo")


def test_an_approval_holds_for_the_champion_that_it_was_asked_about(checkout):
    from flows.promotion import Approval, _answered

    registry = make(checkout)
    for weights, right in (("one", 20), ("two", 45), ("three", 60)):
        trained(checkout, weights, sft=10, para_grpo=right)
        if weights == "two":  # waits for a person, while the third becomes champion
            version = registry.register(candidate(checkout, "para_grpo"), {})
            before, asked = registry.get(CHAMPION), registry.compare(version)
        else:
            assert promote(registry, candidate(checkout, "para_grpo"), {}).decision.better
    yes = Approval(approve=True, reason="looks good", who="Ada")
    assert asked.better
    found = _answered(yes, asked, registry, version, before)
    assert not found.better and found.reason.startswith(
        "the champion is another since it was asked: not better"
    )
    found = _answered(yes, asked, registry, version, registry.get(CHAMPION))
    assert found.better and found.reason.endswith("; Ada approved: looks good")


def test_another_candidate_keeps_its_alias(checkout):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=45)
    first = registry.register(candidate(checkout, "para_grpo"), {})
    decision = registry.compare(first)
    trained(checkout, "two", sft=30, para_grpo=44)
    registry.register(candidate(checkout, "para_grpo"), {})
    registry.conclude(first, decision)
    assert aliases(registry) == {CHAMPION: 1, CANDIDATE: 2}


def test_the_base_has_nothing_to_be_compared_with(checkout, capsys):
    trained(checkout, "one", base=30)
    assert command.main(["promote", "base"]) == command.REFUSED
    assert "no champion and no start to compare with; use --force" in capsys.readouterr().out


def test_results_of_other_weights_are_refused(checkout):
    trained(checkout, "one", sft=30, para_grpo=45)
    lock = json.loads((checkout / "dvc.lock").read_text())
    lock["stages"]["para_grpo"]["outs"][0]["md5"] = "0" * 32 + ".dir"
    (checkout / "dvc.lock").write_text(json.dumps(lock))
    with pytest.raises(
        RegistryError, match="is of another models/para_grpo; run `dvc repro evaluate@para_grpo`"
    ):
        candidate(checkout, "para_grpo")
    trained(checkout, "one", sft=30, para_grpo=45)
    write_results(checkout / "reports/evaluate/para_grpo/results.jsonl", results(60))  # by hand
    with pytest.raises(RegistryError, match="no evaluation of models/para_grpo that is here"):
        candidate(checkout, "para_grpo")


def test_a_server_that_is_away_ends_in_one_sentence(checkout, monkeypatch, capsys):
    trained(checkout, "one", sft=30, para_grpo=45)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(SystemExit, match="1"):
        command.main(["promote"])
    words = capsys.readouterr().err
    assert "registry: tracking at http://***@127.0.0.1:9 does not answer" in words and "hunter22" not in words


def test_weights_come_back_by_their_hash(checkout):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=45)
    promote(registry, candidate(checkout, "para_grpo"), {})
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, cwd=checkout, check=True, timeout=60)
    with pytest.raises(RegistryError, match="in no cache or remote that answers"):
        command.fetch(checkout, registry.get(CHAMPION).tags["dvc.hash"], Path("models/champion"))
    (checkout / "dvc.lock").unlink()  # the pipeline's own lock belongs to no dvc.yaml here
    subprocess.run(
        [sys.executable, "-m", "dvc", "add", "-q", "models/para_grpo"], cwd=checkout, check=True, timeout=60
    )
    command.fetch(checkout, registry.get(CHAMPION).tags["dvc.hash"], Path("models/champion"))
    assert (checkout / "models/champion/model.safetensors").read_text() == "para_grpo one"
    assert not (checkout / "models/champion.dvc").exists()
