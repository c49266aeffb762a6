"""The checkouts in which flows work: clones of the repository, never the folder that a person edits.

    $PARAVT_WORK/clones/0, 1, ...      one for each stage that works at the same time on this machine
    $PARAVT_WORK/pipelines/0, 1, ...   one for each parent: without data, since DVC would take what a stage of
                                       another commit left there for a change
    $PARAVT_WORK/cache                 the DVC cache they share: the local copy of data and models

A clone belongs to whoever holds its lock file; the supervisor of a stage holds it too, so a clone is free
only when nothing runs in it any more, however the flow ended. Only `Clone.commit` writes to the repository.

PARAVT_GIT says where the repository is (default: `origin` of this checkout, else the checkout itself),
PARAVT_DVC_REMOTE where the data is (default: what .dvc/config says). Names of branches come from people: they
are checked by git, given as full refs, and never pass through a shell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import fcntl
import os
from pathlib import Path
import re
import shutil
import subprocess
from typing import Literal

from flows.plan import LOCK_FILE
from stages.params import PARAMS_FILE, ROOT, check, compose, digest, dump, read_yaml
from stages.redact import redact

GIT_TIMEOUT_S = 600
IDENTITY = ("-c", "user.name=paravt pipeline", "-c", "user.email=pipeline@localhost")


class CloneError(RuntimeError):
    """The repository or a clone of it cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Clone:
    """A checkout of one flow run. `held` are file descriptors that keep the clone taken."""

    root: Path
    held: tuple[int, ...] = ()

    def checkout(self, commit: str) -> None:
        """Exactly `commit`: tracked files as in it, nothing else but what git ignores. Raises CloneError."""
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise CloneError(f"{commit!r} is no commit; give the 40 hex digits")
        if not self._has(commit):
            self.fetch()
        if not self._has(commit):
            raise CloneError(f"the repository has no commit {commit}; push it first")
        self.git("checkout", "--quiet", "--force", "--detach", commit)
        # outputs of other commits stay where git ignores them; a dvc.lock that the commit lacks must not
        self.git("clean", "--quiet", "-fd")
        self._configure()

    def fetch(self) -> None:
        self.git("fetch", "--quiet", "--prune", "origin", "+refs/heads/*:refs/remotes/origin/*")

    def head(self, branch: str) -> str | None:
        """The commit of a branch of the repository as last fetched, None if there is no such branch."""
        return self._found(f"refs/remotes/origin/{branch}")

    def resolve(self, ref: str) -> str:
        """The commit of a branch, tag or 40 digits. Raises CloneError for what git does not call a name."""
        if re.fullmatch(r"[0-9a-f]{40}", ref):
            return ref
        ok = not ref.startswith("-") and self._ask("check-ref-format", f"refs/heads/{ref}") is not None
        if not ok:
            raise CloneError(f"{ref!r} is no name of a branch; give a branch, a tag or a commit")
        self.fetch()
        self.git("fetch", "--quiet", "origin", "+refs/tags/*:refs/tags/*")
        found = self.head(ref) or self._found(f"refs/tags/{ref}")
        if found is None:
            raise CloneError(f"the repository has no branch or tag {ref!r}; push it first")
        return found

    def begin(self, ref: str, overrides: Sequence[str] = ()) -> str:
        """Check out the branch on which a pipeline of `ref` records itself; returns the branch's name.

        The name follows from the commit and the overrides. So a pipeline that is started again, or a second
        one of the same content, finds what the first has finished.
        """
        base = self.resolve(ref)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", ref).strip("-")[:40].lower() or "ref"
        if re.fullmatch(r"[0-9a-f]{40}", ref):
            slug = "commit"
        branch = f"runs/{slug}-{base[:10]}" + (f"-{digest(sorted(overrides))[:6]}" if overrides else "")
        self.fetch()
        if known := self.head(branch):
            self.checkout(known)
            return branch
        self.checkout(base)
        if overrides:
            self.compose(overrides)
            self.commit(branch, [PARAMS_FILE], f"Parameters: {' '.join(overrides)}")
        return branch

    def compose(self, overrides: Sequence[str]) -> None:
        """params.yaml from this commit's conf/ with the overrides. Raises ParamsError."""
        data = compose(overrides, self.root / "conf")
        check(data)
        (self.root / PARAMS_FILE).write_text(dump(data), encoding="utf-8")

    def commit(self, branch: str, paths: Sequence[str], message: str) -> str:
        """Commit `paths` and push them to `branch`; the commit. A second pipeline's work there is kept.

        Raises CloneError if the repository does not take it.
        """
        kept = {path: (self.root / path).read_bytes() for path in paths}
        for _ in range(5):
            self.git("add", "--force", "--", *paths)
            if self._ask("diff", "--cached", "--quiet") is None:
                self.git(*IDENTITY, "commit", "--quiet", "--no-verify", "-m", message)
            refused = self._push(branch)
            if not refused:
                return self.git("rev-parse", "HEAD")
            self.fetch()
            theirs = self.head(branch)
            if theirs is None or not re.search("non-fast-forward|fetch first|rejected|lock", refused):
                break
            self.git("reset", "--quiet", "--hard", theirs)
            for path, content in kept.items():
                self._join(path, content)
        raise CloneError(f"the repository did not take {branch}: {refused}")

    def git(self, *words: str) -> str:
        """The output of a git command. Raises CloneError with git's own last line."""
        done = self._run(words)
        if done.returncode:
            said = redact((done.stderr.strip() or "no output").splitlines()[-1])
            raise CloneError(f"git {words[0]} failed: {said}")
        return done.stdout.strip()

    def _join(self, path: str, content: bytes) -> None:
        """Put ours on top of theirs: dvc.lock entry by entry, another file as a whole."""
        if path != LOCK_FILE or not (self.root / path).exists():
            (self.root / path).write_bytes(content)
            return
        from flows.locks import merge

        aside = self.root / ".ours.yaml"
        aside.write_bytes(content)
        try:
            ours = read_yaml(aside)["stages"]
        finally:
            aside.unlink()
        merge(self.root, ours)

    def _push(self, branch: str) -> str:
        """Empty if the repository took HEAD as `branch`, else what it said."""
        done = self._run(("push", "--quiet", "origin", f"HEAD:refs/heads/{branch}"))
        return redact(done.stderr.strip() or "no reason given") if done.returncode else ""

    def _has(self, commit: str) -> bool:
        return self._ask("cat-file", "-e", f"{commit}^{{commit}}") is not None

    def _found(self, ref: str) -> str | None:
        return self._ask("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")

    def _ask(self, *words: str) -> str | None:
        done = self._run(words)
        return None if done.returncode else done.stdout.strip()

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _git(["-C", str(self.root), *words])

    def _configure(self) -> None:
        """Where this machine keeps data, in .dvc/config.local, which git ignores."""
        cache = self.root.parent.parent / "cache"
        lines = ["[cache]", f"    dir = {cache}"]
        if store := os.environ.get("PARAVT_DVC_REMOTE"):
            lines = ["[core]", "    remote = store", *lines, "['remote \"store\"']", f"    url = {store}"]
        (self.root / ".dvc" / "config.local").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def taken(
    work: Path | None = None,
    repository: str | None = None,
    kind: Literal["clones", "pipelines"] = "clones",
) -> Iterator[Clone]:
    """A clone of its kind that nobody else uses, made if all others are taken."""
    home = (work or work_folder()) / kind
    home.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        file = open(home / f"{number}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - held while it is used
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            file.close()
            number += 1
    try:
        root = home / str(number)
        _ensure(root, repository or repository_url())
        yield Clone(root, (file.fileno(),))
    finally:
        file.close()


def work_folder() -> Path:
    """PARAVT_WORK, else a folder in the cache of this user."""
    return Path(os.environ.get("PARAVT_WORK") or Path.home() / ".cache" / "paravt-ops")


def repository_url() -> str:
    """PARAVT_GIT, else `origin` of the checkout that this code is in, else that checkout."""
    if url := os.environ.get("PARAVT_GIT"):
        return url
    done = _git(["-C", str(ROOT), "remote", "get-url", "origin"])
    return done.stdout.strip() if done.returncode == 0 else str(ROOT)


def _ensure(root: Path, url: str) -> None:
    if _git(["-C", str(root), "rev-parse", "--git-dir"]).returncode == 0 and (root / ".git").exists():
        _git(["-C", str(root), "remote", "set-url", "origin", url])
        for stale in (root / ".git").glob("*.lock"):  # of a git that was killed; nobody else is in this clone
            stale.unlink(missing_ok=True)
        return
    shutil.rmtree(root, ignore_errors=True)
    done = _git(["clone", "--quiet", "--no-checkout", "--", url, str(root)])
    if done.returncode:
        raise CloneError(f"the repository cannot be cloned: {redact(done.stderr.strip())}; set PARAVT_GIT")


def _git(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env: Mapping[str, str] = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    env = {name: value for name, value in env.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S, env=env
    )
