"""A stand-in for a vLLM server that the environment names, and weights for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paravt.engines import backend
from paravt.engines.limits import ModelFacts
from paravt.engines.server import KEY, URLS
from tests.standin import StandIn
from tests.tiny import tiny_encoder, tiny_folder


@pytest.fixture(scope="session")
def facts() -> ModelFacts:
    return ModelFacts.of(tiny_folder())


@pytest.fixture
def server(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(backend, "FIRST_WAIT_S", 0.01)
    with StandIn(facts, tiny_encoder().end_id) as standing:
        monkeypatch.setenv(URLS, standing.url)
        monkeypatch.setenv(KEY, "secret")
        yield standing


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder of weights that are not tied: it is handed to the servers as it is."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"tie_word_embeddings": false}')
    return str(tmp_path / "weights")
