"""The endpoint engine against a real vLLM server: what it says as text is what it says as tokens."""

from __future__ import annotations

import math
import os

import pytest

from paravt.agent import run_episodes
from paravt.config import EndpointConfig
from paravt.engines import Request, Sampling
from paravt.engines.openai import OpenAIEngine
from paravt.engines.server import KEY
from tests.tiny import TinyFrames

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def endpoint(engine, encoder, **changes) -> OpenAIEngine:
    config = EndpointConfig(url=engine._backends[0].url, prefill=True, timeout_s=300.0, **changes)
    return OpenAIEngine(config, encoder, os.environ.get(KEY, "") or engine._http.headers["Authorization"][7:])


def test_greedy_text_is_the_text_of_the_greedy_tokens(engine, encoder):
    """Two frames, a system prompt, a begun think: the server's template renders what we render."""
    for prefix in ("<think>\n", ""):
        prompt = encoder.start("You answer.", TinyFrames([0.0, 1.5]), "v.mp4", "Which shape?", prefix)
        request = Request(tuple(prompt.ids), tuple(prompt.visuals), Sampling(0.0, 24))
        [[tokens]] = engine.generate([request])
        [[text]] = endpoint(engine, encoder).generate([request])
        assert text.text == encoder.decode(tokens.ids)
        assert text.finish_reason == tokens.finish_reason
        assert all(math.isnan(value) for value in text.logprobs)


def test_whole_episodes_run_over_it(engine, encoder, agent, samples):
    rollouts = run_episodes(endpoint(engine, encoder), samples[:3], agent(temperature=0.0, group_size=1))
    assert len(rollouts) == 3 and all(rollout.stop_reason != "failed" for rollout in rollouts)
    own = run_episodes(engine, samples[:3], agent(temperature=0.0, group_size=1))
    assert [rollout.turns[0].text for rollout in rollouts] == [rollout.turns[0].text for rollout in own]
