"""One real vLLM server for all tests here, on the CPU, with models/tiny-base; its start takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paravt.agent import AgentSetup
from paravt.chat import ChatEncoder
from paravt.config import Params, VisualConfig
from paravt.data.needles import make_split
from paravt.engines import EngineError
from paravt.engines.factory import make_engine
from paravt.engines.limits import PromptLimits
from paravt.engines.server import KEY, URLS, interpreter
from paravt.engines.vllm import VLLMEngine
from paravt.model import load_encoder
from paravt.rollout import Sample
from stages.params import ROOT, check, compose

BASE = ROOT / "models" / "tiny-base"
VISUAL = VisualConfig(min_pixels=1024, max_pixels=4096)  # frames of one token, and larger ones
FRAMES = 16


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    try:
        interpreter()
    except EngineError as error:
        pytest.skip(str(error))
    if not (BASE / "model.safetensors").is_file():
        pytest.skip(f"{BASE} is not there")


@pytest.fixture(scope="session")
def params() -> Params:
    return check(compose(["engine=vllm"]))


@pytest.fixture(scope="session")
def encoder() -> ChatEncoder:
    return load_encoder(BASE, VISUAL)


@pytest.fixture(scope="session")
def limits(params) -> PromptLimits:
    return PromptLimits.of(params.episode, VISUAL, FRAMES)


@pytest.fixture(scope="session")
def served(environment, params, encoder, limits, tmp_path_factory) -> Iterator[VLLMEngine]:
    """The engine of the whole session. Tests take it by `engine`, which gives it its weights back."""
    logs = tmp_path_factory.mktemp("logs")
    with make_engine(params.engine, BASE, encoder, limits, log_folder=logs) as engine:
        yield engine


@pytest.fixture
def engine(served) -> VLLMEngine:
    """The session's engine with the weights of models/tiny-base."""
    if served.weight_version != 0 or served._broken:
        served.load_weights(str(BASE), 0)
    served.counts.clear()
    return served


@pytest.fixture(scope="session")
def samples(params, tmp_path_factory) -> list[Sample]:
    """Eight questions of the needle world about two videos."""
    folder: Path = tmp_path_factory.mktemp("needles")
    return make_split(params.data.needles, 1, "eval", 8, folder, f"{folder}/")[0]


@pytest.fixture(scope="session")
def agent(params, encoder):
    """The setup of episodes as tiny trains them, eight overview frames."""

    def setup(temperature: float = 1.0, seed: int = 1, group_size: int = 2) -> AgentSetup:
        episode = params.episode.model_copy(update={"temperature": temperature})
        return AgentSetup(encoder, episode, params.visual, lambda sample: 8, seed, group_size)

    return setup


@pytest.fixture
def named(engine, monkeypatch) -> str:
    """The session's server given by its address; returns its key."""
    key = psutil.Process(engine._servers[0].process_group).environ()["VLLM_API_KEY"]
    monkeypatch.setenv(URLS, engine._servers[0].url)
    monkeypatch.setenv(KEY, key)
    return key
