"""Weights over a real group of two, one of them the receiver that vLLM's workers are given."""

from __future__ import annotations

import time

import pytest
from safetensors.torch import load_file
import torch

from paravt.engines import EngineError
from tests.standin import Worker, ask, connected
from tests.tiny import tiny_folder


@pytest.fixture
def engine(server, tmp_path):
    with connected(tmp_path, weight_transfer="gloo") as found:
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


def test_tensors_arrive_as_they_are_over_one_group(engine, server):
    for version in (1, 2):
        engine.load_tensors(some(0.1 * version), version)
        assert_same(server.worker.weights, some(0.1 * version))
        assert engine.generate([ask()])[0][0].weight_version == version
    assert server.worker.joined == 1
    assert not engine.counts


def test_folders_are_read_here_and_sent_with_the_tied_head(engine, server):
    """The first load, at the connection, is that of the served folder: no path goes over."""
    files = load_file(tiny_folder() / "model.safetensors")
    head = server.worker.weights.pop("lm_head.weight")
    torch.testing.assert_close(head, files["model.language_model.embed_tokens.weight"], rtol=0, atol=0)
    assert_same(dict(sorted(server.worker.weights.items())), dict(sorted(files.items())))
    assert server.folder is None


def test_a_worker_that_cannot_load_stops_the_run_at_once_and_the_next_load_works(engine, server):
    server.worker.dies_at = "model.layers.1.weight"
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"version 3 did not arrive: .* 500: KeyError\('model.layers.1"):
        engine.load_tensors(some(0.3), 3)
    assert time.monotonic() - started < 4  # nobody waits for a group's own limit, which is 5 s here
    assert engine.counts == {"weights: HTTP 500": 3}
    assert server.label.endswith("-loading")
    with pytest.raises(EngineError, match="no weights to sample with"):
        engine.generate([ask()])
    server.worker.dies_at = None
    engine.load_tensors(some(0.4), 4)
    assert_same(server.worker.weights, some(0.4))
    assert engine.generate([ask()])[0][0].weight_version == 4


def test_a_server_that_is_started_again_joins_again_and_gets_the_tensors(engine, server):
    engine.load_tensors(some(0.5), 5)

    def restarted(answer: dict) -> str:
        server.label, server.worker = "default", Worker()
        return "drop"

    server.faults = [restarted]
    [[generation]] = engine.generate([ask()])
    assert generation.weight_version == 5
    assert_same(server.worker.weights, some(0.5))
    assert engine.counts["weights loaded anew"] == 1
    assert engine.counts["weights: HTTP 500"] == 1  # the old group, of which the new worker knows nothing


def test_a_worker_that_loads_less_than_was_sent_is_an_error(engine, server, monkeypatch):
    receive = Worker.paravt_receive
    monkeypatch.setattr(Worker, "paravt_receive", lambda self, **what: receive(self, **what) | {"arrived": 4})
    with pytest.raises(EngineError, match=r"was sent 5 weights and reports \[\{'arrived': 4\}\]"):
        engine.load_tensors(some(0.5), 5)


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
