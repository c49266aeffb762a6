"""Clones of flows: the exact commit, one holder, names that are only names, and the record on runs/..."""

from __future__ import annotations

from pathlib import Path
import shutil

import pytest

from flows import locks
from flows.clones import CloneError, taken
from flows.plan import read_lock
from stages.params import ROOT, compose, dump, read_yaml
from tests.repository import git

ENTRY = {
    "cmd": "python work.py",
    "deps": [{"path": "in.txt", "hash": "md5", "md5": "1", "size": 3}],
    "params": {"params.yaml": {"grpo.kl_weight": 1e-06, "sizes": [1, 2]}},
    "outs": [{"path": "out", "hash": "md5", "md5": "2.dir", "size": 8, "nfiles": 2}],
}
BELOW = {"cmd": "true", "deps": [{"path": "out", "hash": "md5", "md5": "2.dir"}]}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    (folder / ".dvc").mkdir(parents=True)
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "params.yaml").write_text(dump(compose(["scale=smoke"])))
    (folder / ".dvc/config").write_text("[core]\n    analytics = false\n")
    (folder / ".dvc/.gitignore").write_text("/config.local\n/tmp\n/cache\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_entries_travel_as_rows_and_come_back_whole():
    assert locks.from_rows(locks.to_rows(ENTRY)) == ENTRY
    with pytest.raises(locks.LockError, match="no command"):
        locks.from_rows([])


def test_a_merged_lock_is_written_as_dvc_writes_it_and_refuses_what_does_not_fit(tmp_path: Path):
    locks.merge(tmp_path, {"above": ENTRY, "below": BELOW})
    assert read_lock(tmp_path) == {"above": ENTRY, "below": BELOW}
    before = (tmp_path / "dvc.lock").read_bytes()
    wrong = BELOW | {"deps": [{"path": "out", "hash": "md5", "md5": "9.dir"}]}
    with pytest.raises(locks.LockError, match="below was made from another out than the one of above"):
        locks.merge(tmp_path, {"below": wrong})
    assert (tmp_path / "dvc.lock").read_bytes() == before


def test_two_flows_have_two_clones_and_a_free_one_is_taken_again(origin: Path, tmp_path: Path):
    work = tmp_path / "work"
    with taken(work, str(origin)) as first, taken(work, str(origin)) as second:
        assert (first.root.name, second.root.name) == ("0", "1")
    with taken(work, str(origin)) as third:
        assert third.root == first.root


def test_a_parent_never_gets_the_clone_in_which_a_stage_left_its_data(origin, tmp_path):
    work = tmp_path / "work"
    with taken(work, str(origin)) as stage:
        (stage.root / "train.txt").write_text("made of another commit")
    with taken(work, str(origin), kind="pipelines") as parent:
        assert parent.root != stage.root and not (parent.root / "train.txt").exists()
    with taken(work, str(origin)) as again:
        assert again.root == stage.root and (again.root / "train.txt").exists()


def test_the_exact_commit_without_leftovers(origin: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PARAVT_DVC_REMOTE", "/store with space")
    one = git(origin, "rev-parse", "HEAD").strip()
    (origin / "two.txt").write_text("2")
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "two")
    with taken(tmp_path / "work", str(origin)) as clone:
        clone.checkout(git(origin, "rev-parse", "HEAD").strip())
        (clone.root / "dvc.lock").write_text("left by another commit")
        clone.checkout(one)
        assert not (clone.root / "two.txt").exists() and not (clone.root / "dvc.lock").exists()
        assert "url = /store with space" in (clone.root / ".dvc/config.local").read_text()
        for wrong in ("HEAD", "main", "--help", "0" * 40):
            with pytest.raises(CloneError):
                clone.checkout(wrong)


def test_parameters_are_recorded_and_a_second_start_finds_the_first(origin: Path, tmp_path: Path):
    with taken(tmp_path / "a", str(origin)) as clone:
        branch = clone.begin("main", ["scale=smoke", "seed=7"])
        head = clone.git("rev-parse", "HEAD")
        assert read_yaml(clone.root / "params.yaml")["seed"] == 7
        assert git(origin, "rev-parse", branch).strip() == head
        with taken(tmp_path / "b", str(origin)) as other:
            assert other.begin("main", ["seed=7", "scale=smoke"]) == branch
            assert other.git("rev-parse", "HEAD") == head
            # both record a stage; neither loses the other's
            locks.merge(clone.root, {"above": ENTRY})
            clone.commit(branch, ["dvc.lock"], "above")
            locks.merge(other.root, {"beside": {"cmd": "true"}})
            other.commit(branch, ["dvc.lock"], "beside")
            assert set(read_lock(other.root)) == {"above", "beside"}


@pytest.mark.parametrize("ref", ["--upload-pack=touch", "-x", "a..b", "a b", "", "x^{/y}", "nowhere"])
def test_what_is_no_branch_is_refused(origin: Path, tmp_path: Path, ref: str):
    with taken(tmp_path / "work", str(origin)) as clone, pytest.raises(CloneError, match="name of|no branch"):
        clone.resolve(ref)


def test_a_branch_named_like_a_command_is_only_a_name(origin: Path, tmp_path: Path):
    name = "$(touch${IFS}pwned);touch${IFS}pwned;'"
    git(origin, "branch", name)
    with taken(tmp_path / "work", str(origin)) as clone:
        assert clone.begin(name).startswith("runs/touch-ifs-pwned-touch-ifs-pwned-")
    assert not list(tmp_path.rglob("pwned"))
