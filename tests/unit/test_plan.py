"""The plan is DVC's own view, with what its status alone does not say."""

from __future__ import annotations

from pathlib import Path

from dvc.repo import Repo
import pytest

from flows.plan import Node, Plan, PlanError, inconsistencies, make_plan, order, select, steps
from stages.params import ROOT

GRAPH = (
    Node("download"),
    Node("sft", ("download",), "gpu"),
    Node("evaluate@base", ("download",), "gpu"),
    Node("evaluate@sft", ("sft",), "gpu"),
    Node("report", ("evaluate@base", "evaluate@sft")),
)
LOCK = {
    "download": {"outs": [{"path": "data", "md5": "d1.dir"}]},
    "sft": {"deps": [{"path": "data", "md5": "d1.dir"}], "outs": [{"path": "models/sft", "md5": "m1.dir"}]},
    "evaluate@base": {"deps": [{"path": "data", "md5": "d1.dir"}], "outs": [{"path": "r/base", "md5": "b1"}]},
    "evaluate@sft": {
        "deps": [{"path": "models/sft", "md5": "m1.dir"}],
        "outs": [{"path": "r/sft", "md5": "s1"}],
    },
    "report": {"deps": [{"path": "r/base", "md5": "b1"}, {"path": "r/sft", "md5": "s1"}], "outs": []},
}


def planned(status=None, lock=LOCK, absent=None) -> dict[str, str]:
    return {step.node.name: step.action for step in steps(GRAPH, status or {}, lock, absent or {})}


def test_nothing_changed():
    assert planned() == {}
    assert str(Plan(GRAPH, ())) == "nothing to do: all stages are up to date"


def test_a_change_reaches_what_stands_on_it_and_nothing_else():
    changed = {"sft": [{"changed deps": {"params.yaml": {"sft.steps": "modified"}}}]}
    found = steps(GRAPH, changed, LOCK, {})
    assert [(step.node.name, step.action, step.reason) for step in found] == [
        ("sft", "run", "sft.steps changed"),
        ("evaluate@sft", "run", "sft runs"),
        ("report", "run", "evaluate@sft runs"),
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("changed command", "changed command"),
        ({"changed deps": {"paravt/sft": "modified"}}, "paravt/sft is modified"),
        ({"changed deps": {"paravt/sft": "new"}}, "paravt/sft is new"),
        ({"changed outs": {"models/sft": "modified"}}, "models/sft is modified"),
    ],
)
def test_reasons_are_said(reason, words):
    (step, *_) = steps(GRAPH, {"sft": [reason]}, LOCK, {})
    assert (step.node.name, step.reason) == ("sft", words)


@pytest.mark.parametrize("state", ["deleted", "not in cache"])
def test_data_that_is_only_absent_is_no_change(state):
    status = {
        "sft": [{"changed deps": {"data": state}}, {"changed outs": {"models/sft": state}}],
        "download": [{"changed outs": {"data": state}}],
    }
    assert planned(status) == {}


def test_absent_outputs_come_from_the_cache_and_make_nothing_run():
    assert planned(absent={"sft": "cached"}) == {"sft": "restore"}


def test_lost_outputs_are_made_again():
    assert planned(absent={"sft": "lost"}) == {"sft": "run", "evaluate@sft": "run", "report": "run"}


def test_a_stage_without_an_entry_runs_though_its_status_says_deleted():
    lock = {name: entry for name, entry in LOCK.items() if name != "evaluate@base"}
    status = {"evaluate@base": [{"changed outs": {"r/base": "deleted"}}]}
    assert planned(status, lock) == {"evaluate@base": "run", "report": "run"}


def test_an_entry_made_from_another_input_runs_though_its_status_says_nothing():
    """A worker that skipped a stale stage leaves such a lock behind."""
    lock = LOCK | {"sft": LOCK["sft"] | {"outs": [{"path": "models/sft", "md5": "m2.dir"}]}}
    assert planned({}, lock) == {"evaluate@sft": "run", "report": "run"}
    assert inconsistencies(lock) == ["evaluate@sft was made from another models/sft than the one of sft"]
    assert inconsistencies(LOCK) == []


def test_targets_bring_what_they_need():
    assert select(GRAPH, ["evaluate@sft"]) == {"evaluate@sft", "sft", "download"}
    assert select(GRAPH, ["evaluate"]) == {"evaluate@base", "evaluate@sft", "sft", "download"}
    assert select(GRAPH, []) == {node.name for node in GRAPH}
    with pytest.raises(PlanError, match=r"no stage 'train'; there are download, sft"):
        select(GRAPH, ["train"])


def test_order_follows_the_graph():
    assert [node.name for node in order(reversed(GRAPH))] == [
        "download",
        "evaluate@base",
        "sft",
        "evaluate@sft",
        "report",
    ]
    with pytest.raises(PlanError, match="a, b wait for each other"):
        order([Node("a", ("b",)), Node("b", ("a",))])


def test_the_graph_is_dvcs_and_pools_are_in_dvc_yaml():
    nodes = {node.name: node for node in make_plan(ROOT).graph}
    assert nodes["sft"].upstream == ("download", "validate")
    assert nodes["report"].upstream == (
        "sft",
        "para_grpo",
        "evaluate@base",
        "evaluate@sft",
        "evaluate@para_grpo",
    )
    pools = {name: node.pool for name, node in nodes.items()}
    assert (pools["download"], pools["para_grpo"], pools["evaluate@base"]) == ("cpu", "gpu", "gpu")
    assert list(nodes)[0] == "download" and list(nodes)[-1] == "report"


TOY = """
stages:
  a:
    cmd: cp in.txt a.txt
    deps: [in.txt]
    params: [lr]
    outs: [a.txt]
    meta: {pool: gpu}
  b:
    matrix: {n: [1, 2]}
    cmd: cp a.txt b${item.n}.txt
    deps: [a.txt]
    outs: ["b${item.n}.txt"]
"""


def test_a_real_repository(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dvc.yaml").write_text(TOY)
    (tmp_path / "params.yaml").write_text("lr: 1e-6\n")
    (tmp_path / "in.txt").write_text("1")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "dvc.yaml").write_text("stages: {far: {cmd: echo 1}}\n")

    def names() -> dict[str, str]:
        return {step.node.name: step.action for step in make_plan(tmp_path).steps}

    with Repo.init(str(tmp_path), no_scm=True) as repo:
        assert names() == {"a": "run", "b@1": "run", "b@2": "run"}
        repo.reproduce()
        assert names() == {}
        (tmp_path / "params.yaml").write_text("lr: 0.000001\n")
        assert names() == {}
        (tmp_path / "params.yaml").write_text("lr: 0.000002\n")
        assert names() == {"a": "run", "b@1": "run", "b@2": "run"}
        (tmp_path / "params.yaml").write_text("lr: 0.000001\n")
        (tmp_path / "b1.txt").unlink()
        assert names() == {"b@1": "restore"}
        (tmp_path / "a.txt").unlink()
        assert names() == {"a": "restore", "b@1": "restore"}
        for path in (tmp_path / ".dvc" / "cache").rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                path.unlink()
        assert names() == {"a": "run", "b@1": "run", "b@2": "run"}
    monkeypatch.chdir(tmp_path / "study")
    assert names() == {"a": "run", "b@1": "run", "b@2": "run"}


def test_a_dvc_yaml_that_dvc_cannot_read_is_one_sentence(tmp_path: Path):
    Repo.init(str(tmp_path), no_scm=True).close()
    (tmp_path / "dvc.yaml").write_text("stages: {a: {}}\n")
    with pytest.raises(PlanError, match="DVC cannot read the pipeline") as refusal:
        make_plan(tmp_path)
    assert "\n" not in str(refusal.value)
