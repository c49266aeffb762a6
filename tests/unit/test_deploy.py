"""What the Prefect server and its workers are told."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flows import stage as worker
from flows.deploy import pools, schedules, zombies
from flows.remote import main
from paravt.engines.server import PYTHON
from stages.params import ROOT


def test_every_state_of_our_own_ends_the_wait_for_a_heartbeat():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "flows").glob("*.py"))
    names = set(re.findall(r"(?:Failed|Completed|Cancelled|Crashed)\(\s*name=(\w+)", sources))
    assert names == {"REFUSED", "WORSE"}
    states = {re.search(rf'^{name} = "(\w+)"', sources, re.M)[1] for name in names}
    ends = {"Completed", "Failed", "Cancelled", "Crashed"} | states
    assert {f"prefect.flow-run.{state}" for state in ends} <= zombies().trigger.expect


class Server:
    """What of Prefect's client these calls use."""

    def __init__(self) -> None:
        self.switched: list[tuple[str, bool]] = []

    def read_deployments(self) -> list[SimpleNamespace]:
        def deployment(number: str, entrypoint: str, name: str) -> SimpleNamespace:
            schedule = SimpleNamespace(id=f"s{number}", schedule=SimpleNamespace(cron="0 3 * * 0"))
            return SimpleNamespace(id=number, entrypoint=entrypoint, name=name, schedules=[schedule])

        return [
            deployment("1", "flows.remote.pipeline", "remote"),
            deployment("2", "billing.main", "nightly"),
            deployment("3", "flows.remote.pipeline", "somebody's own"),
        ]

    def update_deployment_schedule(self, deployment: str, schedule: str, active: bool) -> None:
        self.switched.append((deployment, active))

    def read_work_pool(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, concurrency_limit=2)


def test_only_our_own_schedules_are_switched():
    server = Server()
    assert schedules(server, True) == ["remote 0 3 * * 0"]
    assert server.switched == [("1", True)]


def test_a_pool_that_is_there_keeps_the_limit_that_an_operator_gave_it():
    pools(Server())  # a client without any way to change a pool


def test_a_stage_finds_what_its_clone_does_not_hold(tmp_path, monkeypatch):
    for name in (PYTHON, "PARAVT_MEDIA_ROOT", "STAGE_PYTHON_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARAVT_WORK", str(tmp_path / "work"))
    monkeypatch.setattr(worker, "INSTALLATION", tmp_path)
    media = {"PARAVT_MEDIA_ROOT": str(tmp_path / "work" / "media")}
    assert worker.stage_environment(tmp_path / "clone", "gpu", None) == {
        "PYTHONPATH": str(tmp_path / "clone"),
        **media,
    }
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    told = worker.stage_environment(tmp_path / "clone", "gpu", "abc")
    assert told == {
        "PYTHONPATH": str(tmp_path / "clone"),
        PYTHON: str(python),
        **media,
        "PIPELINE_RUN_ID": "abc",
    }
    monkeypatch.setenv(PYTHON, "/opt/vllm/bin/python")
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", "/data/media")
    assert worker.stage_environment(tmp_path / "clone", "gpu", None).keys() == {"PYTHONPATH"}


def test_the_remote_pipeline_without_a_server_says_what_to_set(monkeypatch, capsys):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "remote: PREFECT_API_URL is not set; write for example http://127.0.0.1:4200/api\n"
    )
