"""A real vLLM server that is killed, asked without its key, shared by two runs, or not the one expected."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

from paravt.agent import run_episodes
from paravt.engines import EngineError
from paravt.engines.factory import make_engine
from paravt.engines.server import KEY
from tests.tiny import tiny_encoder, tiny_folder
from tests.vllm.conftest import BASE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def processes(engine) -> list[psutil.Process]:
    group = engine._servers[0].process_group
    return [p for p in psutil.process_iter() if p.pid != group and _group(p.pid) == group]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def status(url: str, method: str = "GET", key: str | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = b"{}" if method == "POST" else None
    try:
        asked = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_no_path_but_health_is_answered_without_the_key(engine):
    url = engine._servers[0].url
    assert status(f"{url}/health") == 200
    for path in (
        "/collective_rpc",
        "/pause",
        "/update_weight_version",
        "/inference/v1/generate",
        "/tokenize",
    ):
        assert status(url + path, "POST") == status(url + path, "POST", "wrong") == 401, path
    assert status(f"{url}/v1/models") == 401


def test_it_listens_on_loopback_alone(engine):
    listening = [
        connection.laddr.ip
        for process in processes(engine)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}


def test_the_key_stands_on_no_command_line_and_in_no_log(engine):
    key = psutil.Process(engine._servers[0].process_group).environ()["VLLM_API_KEY"]
    assert len(key) == 48
    assert all(key not in " ".join(process.cmdline()) for process in processes(engine))
    assert key not in engine._servers[0].log_path.read_text(errors="replace")


def test_another_model_than_expected_is_refused(named, params, limits, tmp_path):
    with (
        pytest.raises(EngineError, match="another model than"),
        make_engine(params.engine, tiny_folder(), tiny_encoder(), limits, log_folder=tmp_path),
    ):
        pass


def test_a_wrong_key_is_told(named, params, encoder, limits, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "wrong")
    with (
        pytest.raises(EngineError, match="refuses the key"),
        make_engine(params.engine, BASE, encoder, limits, log_folder=tmp_path),
    ):
        pass


def test_two_runs_on_one_server_do_not_mix(named, engine, params, encoder, limits, samples, agent, tmp_path):
    with make_engine(params.engine, BASE, encoder, limits, log_folder=tmp_path) as second:
        assert run_episodes(second, samples[:1], agent())[0].stop_reason != "failed"
        with pytest.raises(EngineError, match="which this run has not given it"):
            run_episodes(engine, samples[:1], agent())
    engine.load_weights(str(BASE), 1)
    assert run_episodes(engine, samples[:1], agent())[0].weight_versions == (1,)


def test_weights_that_cannot_be_loaded_stop_the_run(engine, samples, agent, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="weights of version 2 did not arrive"):
        engine.load_weights(str(tmp_path), 2)
    with pytest.raises(EngineError, match="no weights to sample with"):
        run_episodes(engine, samples[:1], agent())


def test_a_server_that_is_killed_in_the_middle_comes_back_with_its_weights(engine, samples, agent):
    """The process that computes is killed while episodes run; they end as if nothing had happened."""
    engine.load_weights(str(BASE), 3)
    wanted = run_episodes(engine, samples, agent(group_size=4))
    computing = max(processes(engine), key=lambda process: process.create_time())

    def kill() -> None:
        time.sleep(1.0)
        computing.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run_episodes(engine, samples, agent(group_size=4))
    killer.join()
    assert engine.counts["server restarted"] == 1
    assert [r.main.ids for r in found] == [r.main.ids for r in wanted]
    assert {version for r in found for version in r.weight_versions} == {3}
