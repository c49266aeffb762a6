from __future__ import annotations

from pathlib import Path

from dvc.repo import Repo
import pytest
from ruamel.yaml import YAML

from stages.definition import Definition, definition, definitions, dvc_hash, fingerprint, hash_all
from stages.params import ROOT, ParamsError

DVC_YAML = """
stages:
  make:
    cmd: python -m
      stages.make
    deps: [code]
    params: [seed, {params.yaml: [a.b]}]
    outs:
      - data/made
  judge:
    matrix:
      model: [base, sft]
    cmd: python judge.py ${item.model}
    deps: ["data/made", "models/${item.model}"]
    outs: ["reports/${item.model}": {cache: false}]
"""


def test_stages_are_read_with_their_matrix_items(tmp_path: Path):
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    assert list(definitions(tmp_path)) == ["make", "judge@base", "judge@sft"]
    assert definition("make", tmp_path) == Definition(
        "make", "python -m stages.make", ("code",), ("seed", "a.b"), ("data/made",)
    )
    assert definition("judge@sft", tmp_path) == Definition(
        "judge@sft", "python judge.py sft", ("data/made", "models/sft"), (), ("reports/sft",)
    )
    with pytest.raises(ParamsError, match=r"no stage 'judge'; it has make, judge@base, judge@sft"):
        definition("judge", tmp_path)


def test_our_reading_of_dvc_yaml_is_dvcs_own():
    ours = definitions(ROOT)
    with Repo(str(ROOT)) as repo:
        theirs = {stage.name: stage for stage in repo.index.stages if stage.path_in_repo == "dvc.yaml"}
    assert list(ours) == list(theirs)
    for name, stage in theirs.items():
        paths = {dep.def_path for dep in stage.deps if dep.def_path != "params.yaml"}
        groups = {group for dep in stage.deps if dep.def_path == "params.yaml" for group in dep.params}
        assert set(ours[name].deps) == paths
        assert set(ours[name].params) == groups
        assert list(ours[name].outs) == [out.def_path for out in stage.outs]
        assert ours[name].cmd == " ".join(stage.cmd.split())


def test_hashes_are_dvcs_own(tmp_path: Path):
    folder = tmp_path / "f"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "sub dir" / "b.bin").write_bytes(bytes(range(256)))
    (folder / "a é.txt").write_text("windows line\r\nunix line\n")
    (folder / "z").write_bytes(b"")
    with Repo.init(str(tmp_path), no_scm=True) as repo:
        repo.add([str(folder)])
    lock = YAML(typ="safe").load((tmp_path / "f.dvc").read_text())
    assert dvc_hash(folder) == lock["outs"][0]["md5"]
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert dvc_hash(folder) == lock["outs"][0]["md5"]
    assert dvc_hash(tmp_path / "nothing") is None


def test_the_fingerprint_changes_with_what_the_stage_stands_on_and_with_nothing_else(tmp_path: Path):
    (tmp_path / "code").write_text("1")
    stage = Definition("s", "run", ("code",), ("a.b",), ("out",))
    base = fingerprint(stage, {"a": {"b": 1e-6}, "c": 1}, hash_all(stage.deps, tmp_path))
    assert fingerprint(stage, {"a": {"b": 0.000001}, "c": 2}, hash_all(stage.deps, tmp_path)) == base
    assert fingerprint(stage, {"a": {"b": 2e-6}}, hash_all(stage.deps, tmp_path)) != base
    assert fingerprint(Definition("s", "ran", ("code",), ("a.b",), ()), {"a": {"b": 1e-6}}, {}) != base
    (tmp_path / "code").write_text("2")
    assert fingerprint(stage, {"a": {"b": 1e-6}}, hash_all(stage.deps, tmp_path)) != base
