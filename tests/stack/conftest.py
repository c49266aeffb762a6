"""One stack for all tests of this folder: real servers, two real workers, a folder as the DVC remote.

The repository is a miniature: three stages (`first` on cpu, `train` on gpu, `last` on cpu) that write down in
EVIDENCE each time they run, and that wait or kill themselves where a test asks for it by a file there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from flows.stack import Stack, running
from stages.params import ROOT, compose, dump
from tests.repository import git

WORK = """
import os, pathlib, signal, subprocess, sys, time
name = sys.argv[1]
evidence = pathlib.Path(os.environ["EVIDENCE"])
salt = pathlib.Path("salt.txt").read_text().strip()
hold, kill = evidence / f"hold-{salt}-{name}", evidence / f"kill-{salt}-{name}"
with open(evidence / f"ran-{salt}-{name}", "a") as file:
    file.write(f"{os.getpid()}\\n")
if hold.exists():
    # a server in a session of its own, as an engine would be
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
while hold.exists():
    time.sleep(0.1)
if kill.exists():
    kill.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
print(f"{name} [########################] 1/1", flush=True)
pathlib.Path(f"{name}.txt").write_text(f"{salt} {name}\\n")
"""

STAGES = """
stages:
  first:
    cmd: python work.py first
    deps: [salt.txt, work.py]
    outs: [first.txt]
    meta: {pool: cpu}
  train:
    cmd: python work.py train
    deps: [first.txt, salt.txt, work.py]
    params: [grpo.kl_weight]
    outs: [train.txt]
    meta: {pool: gpu}
  last:
    cmd: python work.py last
    deps: [train.txt, salt.txt, work.py]
    outs: [last.txt]
    meta: {pool: cpu}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def webhook(told: list[dict]) -> Iterator[str]:
    """The address of a webhook that keeps the JSON that it is sent."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    server.server_close()


@dataclass
class World:
    """The running stack, the origin of the miniature, and what tests do with them; `told`: by its webhook."""

    stack: Stack
    origin: Path
    desk: Path
    evidence: Path
    told: list[dict]

    def branch(self, name: str, salt: str) -> str:
        """A commit of its own on a branch of the origin; its id."""
        git(self.desk, "checkout", "-q", "-B", name, "main")
        (self.desk / "salt.txt").write_text(f"{salt}\n")
        git(self.desk, "commit", "-q", "-am", salt)
        git(self.desk, "push", "-q", "--force", "origin", f"HEAD:refs/heads/{name}")
        return git(self.desk, "rev-parse", "HEAD").strip()

    def ran(self, salt: str, stage: str) -> list[int]:
        """The processes that ran a stage."""
        path = self.evidence / f"ran-{salt}-{stage}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def counts(self, salt: str) -> tuple[int, int, int]:
        return tuple(len(self.ran(salt, stage)) for stage in ("first", "train", "last"))

    def hold(self, salt: str, stage: str) -> Path:
        path = self.evidence / f"hold-{salt}-{stage}"
        path.touch()
        return path

    def start(self, deployment: str = "pipeline/remote", **parameters: Any) -> Any:
        """A run of a deployment."""
        from prefect.deployments import run_deployment

        # said to be sync, because a browser's loop runs in this thread
        return run_deployment(deployment, parameters=parameters, timeout=0, as_subflow=False, _sync=True)

    def state(self, run: Any) -> Any:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            return client.read_flow_run(run.id).state

    def end(self, run: Any, seconds: float = 400) -> Any:
        """The state in which a run ended."""
        self.until(lambda: self.state(run).is_final(), seconds)
        return self.state(run)

    def children(self, run: Any) -> list:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

        wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id]))
        with get_client(sync_client=True) as client:
            return client.read_flow_runs(flow_run_filter=wanted)

    def until(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not in {seconds} s; logs in {self.stack.home / 'logs'}"
            time.sleep(0.2)
        return found

    def recorded(self, prefix: str) -> str:
        """The branch runs/... that the pipeline of a branch was recorded on."""
        heads = git(self.origin, "for-each-ref", "--format=%(refname:short)", f"refs/heads/runs/{prefix}*")
        (found,) = heads.split()
        return found


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("stack")
    desk, origin, evidence = folder / "desk", folder / "origin.git", folder / "evidence"
    for path in (desk, evidence):
        path.mkdir()
    for name, text in {
        "dvc.yaml": STAGES,
        "work.py": WORK,
        "salt.txt": "none\n",
        "params.yaml": dump(compose(["scale=smoke"])),
        ".gitignore": "/first.txt\n/train.txt\n/last.txt\n.scratch/\n",
        ".dvc/config": (ROOT / ".dvc/config").read_text(),
        ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
    }.items():
        (desk / name).parent.mkdir(exist_ok=True)
        (desk / name).write_text(text)
    shutil.copytree(ROOT / "conf", desk / "conf")
    git(desk, "init", "-q", "-b", "main")
    git(desk, "add", "-A")
    git(desk, "commit", "-q", "-m", "miniature")
    git(folder, "clone", "-q", "--bare", str(desk), str(origin))
    git(desk, "remote", "add", "origin", str(origin))
    from prefect.settings import PREFECT_API_URL, temporary_settings

    told: list[dict] = []
    with webhook(told) as url:
        extra = {"EVIDENCE": str(evidence), "PARAVT_NOTIFY_URL": url}
        stack = Stack(folder / "home", str(origin), free_port(), free_port(), extra)
        with running(stack), temporary_settings({PREFECT_API_URL: stack.environment["PREFECT_API_URL"]}):
            yield World(stack, origin, desk, evidence, told)


def command(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess:
    """`python -m WORDS` in a folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"PATH": path} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
