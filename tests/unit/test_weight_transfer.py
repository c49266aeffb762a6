"""Weights over a real group, its other processes the receivers that vLLM's workers are given."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
import torch

from paravt.engines import EngineError
from paravt.engines.served import transfer_group
from tests.standin import Worker, ask, connected
from tests.tiny import tiny_folder

PATIENCE_S = 4.0  # far less than any limit of a group


@pytest.fixture
def engine(server, tmp_path):
    with connected(tmp_path, weight_transfer="gloo") as found:
        for worker in server.workers:
            worker._paravt_shapes = None  # the tests send less than a model
        yield found


def some(value: float) -> dict[str, torch.Tensor]:
    """Weights of several dtypes and layouts."""
    wide = torch.arange(24.0).reshape(4, 6)
    return {
        "model.norm.weight": torch.full((5,), value),
        "model.layers.0.weight": wide.T + value,  # not contiguous
        "model.layers.1.weight": (wide * value).bfloat16(),
        "model.scalar": torch.tensor(value),
        "lm_head.weight": torch.full((300, 400), value),
    }


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_tensors_arrive_at_each_worker_as_they_are_over_one_group(server, tmp_path, workers):
    server.workers = [Worker(rank) for rank in range(workers)]
    with connected(tmp_path, weight_transfer="gloo") as engine:
        for worker in server.workers:
            worker._paravt_shapes = None
        for version in (1, 2):
            engine.load_tensors(some(0.1 * version), version)
            for worker in server.workers:
                assert_same(worker.weights, some(0.1 * version))
            assert engine.generate([ask()])[0][0].weight_version == version
        assert [worker.joined for worker in server.workers] == [1] * workers
        assert not engine.counts


def test_folders_are_read_here_and_sent_with_the_tied_head(engine, server):
    """The first load, at the connection, is that of the served folder: no path goes over."""
    [worker] = server.workers
    files = load_file(tiny_folder() / "model.safetensors")
    head = worker.weights.pop("lm_head.weight")
    torch.testing.assert_close(head, files["model.language_model.embed_tokens.weight"], rtol=0, atol=0)
    assert_same(dict(sorted(worker.weights.items())), dict(sorted(files.items())))
    assert server.folder is None


def test_an_index_says_which_files_are_the_models(engine, server, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(EngineError, match="version 1 did not arrive: .* holds no weights"):
        engine.load_weights(str(folder), 1)
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "unused.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    engine.load_weights(str(folder), 2)
    assert_same(server.workers[0].weights, {"a": torch.ones(2), "b": torch.ones(3)})


class Once:
    """A fault of a worker's first call alone."""

    def __init__(self, fault) -> None:
        self.fault, self.met = fault, False

    def __call__(self) -> dict[str, Any] | None:
        met, self.met = self.met, True
        return None if met else self.fault()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_worker_that_fails_is_heard_at_once_and_the_next_try_has_a_new_group(server, tmp_path, workers):
    """The others wait in the group meanwhile: they are told by its connections."""
    server.workers = [Worker(rank) for rank in range(workers)]
    with connected(tmp_path, weight_transfer="gloo") as engine:
        before = dict(server.workers[0].weights)
        failing = server.workers[-1]

        def fail() -> dict[str, Any]:
            failing._paravt_group = None
            return {"error": "OutOfMemoryError: not today"}

        failing.fault = Once(fail)
        started = time.monotonic()
        engine.load_tensors(dict(before), 3)
        assert time.monotonic() - started < PATIENCE_S
        assert engine.counts == {"weights: transfer broken": 1}
        for worker in server.workers:
            assert worker.joined == 2
            assert_same(worker.weights, before)


def test_a_worker_that_always_fails_stops_the_run_with_its_words(engine, server):
    server.workers[0].fault = lambda: {"error": "OutOfMemoryError: not today"}
    with pytest.raises(EngineError, match="version 3 did not arrive: the workers say: OutOfMemoryError"):
        engine.load_tensors(some(0.3), 3)
    assert engine.counts == {"weights: transfer broken": 3}
    assert server.label.endswith("-loading")
    with pytest.raises(EngineError, match="no weights to sample with"):
        engine.generate([ask()])
    server.workers[0].fault = lambda: None
    engine.load_tensors(some(0.4), 4)
    assert engine.generate([ask()])[0][0].weight_version == 4


def test_a_transfer_that_breaks_leaves_the_old_weights_whole(engine, server, monkeypatch):
    engine.load_tensors(some(0.3), 3)
    real, sent = transfer_group.broadcast, []

    def breaking(group, tensor) -> None:
        sent.append(tensor)
        if len(sent) == 3:
            raise RuntimeError("the cable is cut")
        real(group, tensor)

    monkeypatch.setattr(transfer_group, "broadcast", breaking)
    before = dict(server.workers[0].weights)
    seen = []
    server.workers[0].fault = lambda: seen.append(dict(server.workers[0].weights))
    engine.load_tensors(some(0.4), 4)
    assert engine.counts == {"weights: transfer broken": 1}
    for found in seen:  # at the first try and at the second
        assert_same(found, before)
    assert len(seen) == 2
    assert_same(server.workers[0].weights, some(0.4))


def test_a_worker_that_does_nothing_has_a_limit(server, tmp_path, monkeypatch):
    """It neither receives nor lets go of the group, and its server does not answer."""
    monkeypatch.setattr(transfer_group, "STALL_S", 1.5)
    done = threading.Event()
    with connected(tmp_path, weight_transfer="gloo", retries=0, request_timeout_s=2.0) as engine:
        [worker] = server.workers
        worker.fault = lambda: done.wait(20) and {}
        large = {
            name: tensor.repeat(200, *[1] * (tensor.dim() - 1)) for name, tensor in worker.weights.items()
        }
        worker._paravt_shapes = None
        started = time.monotonic()
        with pytest.raises(EngineError, match="version 5 did not arrive"):
            engine.load_tensors(large, 5)
        assert time.monotonic() - started < 2 + PATIENCE_S
        done.set()


def test_a_server_that_cannot_join_is_told_at_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "paravt_join", lambda self, **what: {"error": "RuntimeError: no such host"})
    started = time.monotonic()
    with (
        pytest.raises(EngineError, match="version 0 did not arrive: the workers say: RuntimeError: no"),
        connected(tmp_path, weight_transfer="gloo"),
    ):
        pass
    assert time.monotonic() - started < PATIENCE_S


def test_other_weights_than_those_loaded_first_are_refused_untouched(server, tmp_path):
    with connected(tmp_path, weight_transfer="gloo") as engine:
        [worker] = server.workers
        first = dict(worker.weights)
        other = dict(first) | {"model.nowhere": torch.zeros(2), "lm_head.weight": torch.zeros(3, 3)}
        other.pop("model.visual.merger.norm.weight")
        words = (
            r"model.nowhere \(of 1\) is not among those; model.visual.merger.norm.weight \(of 1\) is missing "
            r"from those; lm_head.weight \(of 1\) has another shape than among those that were loaded first"
        )
        with pytest.raises(EngineError, match=words):
            engine.load_tensors(other, 1)
        assert_same(worker.weights, first)
        assert not engine.counts  # it would be no better the next time
        engine.load_tensors(first, 2)
        assert engine.generate([ask()])[0][0].weight_version == 2


def test_a_server_that_is_started_again_joins_again_and_gets_the_tensors(engine, server):
    engine.load_tensors(some(0.5), 5)

    def restarted(answer: dict) -> str:
        server.label, server.workers = "default", [Worker()]
        return "drop"

    server.faults = [restarted]
    [[generation]] = engine.generate([ask()])
    assert generation.weight_version == 5
    assert_same(server.workers[0].weights, some(0.5))
    assert engine.counts["weights loaded anew"] == 1
    assert engine.counts["weights: transfer broken"] == 1  # in the old group, unknown to the new worker


def test_weights_that_stopped_on_their_way_are_sent_again_when_they_are_missed(engine, server):
    """As after a load that was taken back: the label says so, and nothing is sampled with it."""
    engine.load_tensors(some(0.5), 5)
    server.label = f"{server.label.rpartition('-')[0]}-loading"
    server.workers[0].weights = {}
    [[generation]] = engine.generate([ask()])
    assert generation.weight_version == 5
    assert_same(server.workers[0].weights, some(0.5))
    assert engine.counts == {"half loaded": 1, "weights loaded anew": 1}


def test_a_worker_that_loads_less_than_was_sent_is_an_error(engine, server, monkeypatch):
    receive = Worker.paravt_receive
    monkeypatch.setattr(Worker, "paravt_receive", lambda self, **what: receive(self, **what) | {"arrived": 4})
    with pytest.raises(EngineError, match=r"was sent 5 weights and reports \[\{'arrived': 4\}\]"):
        engine.load_tensors(some(0.5), 5)


def test_nothing_listens_but_where_it_was_told_and_not_after_the_end(server, tmp_path):
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process(os.getpid()).net_connections("inet")
        return {(item.laddr.ip, item.laddr.port) for item in found if item.status == psutil.CONN_LISTEN}

    before = listening()
    with connected(tmp_path, weight_transfer="gloo", transfer_host="127.0.0.2") as engine:
        opened = listening() - before
        # the store and the trainer's end; the worker's is at the address from which it sees that one
        assert sorted(ip for ip, _ in opened) == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
        server.workers.clear()
    deadline = time.monotonic() + 5
    while listening() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert listening() <= before
    assert engine.counts == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"weight_transfer": "nccl"}, "nccl, but no GPU is here; write gloo"),
        ({"weight_transfer": "gloo", "transfer_host": "192.0.2.1"}, "cannot listen on engine.transfer_host"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a GPU")
def test_what_cannot_be_sent_is_told_at_the_start(server, tmp_path, config, words):
    with pytest.raises(EngineError, match=words), connected(tmp_path, **config):
        pass


def test_tensors_do_not_go_over_the_disk(server, tmp_path, weights):
    with connected(tmp_path) as engine:
        assert not engine.takes_tensors
        with pytest.raises(EngineError, match="weight_transfer is disk: give a folder"):
            engine.load_tensors(some(1.0), 1)
        engine.load_weights(weights, 2)
        assert engine.generate([ask()])[0][0].weight_version == 2
