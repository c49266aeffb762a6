"""The client of vLLM servers against a stand-in: what it sends and trusts, and what it does in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from paravt.conversation import Visual
from paravt.engines import EngineError, Request, Sampling
from paravt.engines.limits import ModelFacts
from paravt.engines.server import KEY, URLS
from paravt.engines.vllm import VLLMEngine
from tests.standin import WORD, StandIn, ask, connected, decode
from tests.tiny import tiny_encoder, tiny_folder

GENERATE = "/inference/v1/generate"


@pytest.fixture
def engine(server, tmp_path) -> Iterator[VLLMEngine]:
    with connected(tmp_path) as found:
        server.bodies.clear()
        server.calls.clear()
        yield found


def test_what_is_sent_and_what_comes_back(engine, server, facts):
    request = ask(n=3, temperature=0.7)
    [generations] = engine.generate([request])
    [body] = server.bodies
    assert [(g.ids, g.logprobs, g.finish_reason, g.weight_version) for g in generations] == 3 * [
        ([WORD, tiny_encoder().end_id], [-1.5, -1.5], "stop", 0)
    ]
    assert body["token_ids"].count(facts.image_pad_id) == 2 < request.ids.count(facts.image_pad_id)
    for visual, part in zip(request.visuals, body["content_parts"], strict=True):
        np.testing.assert_array_equal(decode(part["url"]), visual.image)
    sampling = body["sampling_params"]
    assert (sampling["n"], sampling["temperature"], sampling["max_tokens"]) == (3, 0.7, 12)
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["logprobs"]) == (1, 0, 0, 0)
    assert 0 <= sampling["seed"] < 2**62  # the server adds the sample's index to it
    assert sampling["logit_bias"] == {str(token): -100.0 for token in facts.unsampled_ids}
    assert sampling["stop_token_ids"] == sorted(tiny_encoder().end_ids)
    assert not engine.counts


def test_greedy_is_asked_once_and_given_n_times(engine, server):
    [generations] = engine.generate([ask(temperature=0.0, n=4)])
    assert len(generations) == 4
    assert server.bodies[0]["sampling_params"]["n"] == 1
    generations[0].ids.append(1)
    assert generations[1].ids == [WORD, tiny_encoder().end_id]


def test_a_prompt_near_the_context_is_cut_there(engine, server):
    request = Request(tuple([WORD] * 1995), (), Sampling(1.0, 100))
    engine.generate([request])
    assert server.bodies[0]["sampling_params"]["max_tokens"] == 5


async def hang(answer: dict) -> None:
    await asyncio.sleep(3)


def give_up(answer: dict) -> None:
    answer["choices"][0]["finish_reason"] = "abort"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda answer: 500, "HTTP 500"),
        (lambda answer: 503, "HTTP 503"),
        (lambda answer: 429, "HTTP 429"),
        (lambda answer: "drop", "connection lost"),
        (hang, "timeout"),
        (give_up, "unfinished"),
    ],
)
def test_what_may_pass_is_tried_again_and_counted(server, tmp_path, fault, reason):
    with connected(tmp_path, request_timeout_s=0.5) as engine:
        server.faults = [fault, fault]
        [[generation]] = engine.generate([ask()])
        assert generation.ids == [WORD, tiny_encoder().end_id]
        assert engine.counts == {reason: 2}


def test_a_request_that_always_fails_is_named_and_the_engine_goes_on(engine, server):
    server.broken[GENERATE] = 500
    with pytest.raises(EngineError, match="request 0 failed 3 times, last: .* 500: broken") as caught:
        engine.generate([ask()])
    assert caught.value.request == 0
    server.broken.clear()
    assert len(engine.generate([ask(), ask()])) == 2


def test_a_server_that_is_gone_fails_the_whole_call(engine, server):
    server.stop()
    with pytest.raises(EngineError, match="failed 3 times, last: .* cannot be reached") as caught:
        engine.generate([ask()])
    assert caught.value.request is None


def test_a_request_that_the_server_refuses_is_not_sent_again(engine, server):
    server.faults = [lambda answer: 400]
    with pytest.raises(EngineError, match=r"request 0: .* refuses it \(400\): on demand") as caught:
        engine.generate([ask()])
    assert caught.value.request == 0
    assert len(server.bodies) == 1


def other_prompt(answer: dict) -> None:
    answer["prompt_token_ids"].insert(3, WORD)


def foreign_weights(answer: dict) -> None:
    answer["choices"][0]["weight_versions"] = [{"version": "someone-4", "start": 0, "end": 2}]


def no_number(answer: dict) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0


def short_logprobs(answer: dict) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()


def banned(answer: dict) -> None:
    answer["choices"][0]["token_ids"][0] = ModelFacts.of(tiny_folder()).image_pad_id


def no_end(answer: dict) -> None:
    answer["choices"][0]["token_ids"][1] = WORD


def one_less(answer: dict) -> None:
    answer["choices"].pop()


def unlabelled(answer: dict) -> None:
    answer["choices"][0]["weight_versions"] = None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_prompt, "another prompt than was sent: .* the first difference at 3"),
        (foreign_weights, "weights 'someone-4', which this run has not given it"),
        (no_number, "no finite log-prob"),
        (short_logprobs, "2 sampled ids came with 1 log-probs"),
        (banned, "control tokens .* were sampled"),
        (no_end, "ended by 'stop' has 10 as its last token"),
        (one_less, "2 continuations were asked for, 1 came back"),
        (unlabelled, "nothing of the weights"),
        (lambda answer: answer.pop("choices") and None, "not of the kind expected"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_error(engine, server, fault, words):
    server.faults = [fault]
    with pytest.raises(EngineError, match=words):
        engine.generate([ask(n=2)])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        (lambda: ask([0.0, 1.0, 2.0, 3.0, 4.0]), "5 frames, but the servers take 4 a prompt"),
        (lambda: Request(tuple([WORD] * 2000), (), Sampling(1.0, 5)), "2000 tokens fill the context of 2000"),
        (lambda: ask(n=65), "65 samples, but engine.max_sequences is 64"),
        (lambda: Request(ask().ids, (), Sampling(1.0, 5)), "image pads stand in its tokens"),
        (
            lambda: Request(ask([0.0], (32, 32)).ids, (Visual("a.mp4", 0.0, (1, 2, 2)),), Sampling(1.0, 5)),
            "a frame has no pixels",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_sent(engine, server, request_of, words):
    with pytest.raises(EngineError, match=words) as caught:
        engine.generate([ask(), request_of()])
    assert caught.value.request == 1
    assert not server.calls


def test_weights_are_loaded_in_order_and_stamped(engine, server, weights):
    engine.load_weights(weights, 3)
    assert server.calls == [
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/update_weight_version",
        "/resume",
        "/weight_info",
    ]
    assert server.folder == weights
    assert engine.generate([ask()])[0][0].weight_version == 3


def test_a_stale_sample_is_an_error(engine, server, weights):
    old = server.label
    engine.load_weights(weights, 1)
    server.label = old
    with pytest.raises(EngineError, match="weights of version 0, but 1 was loaded"):
        engine.generate([ask()])


@pytest.mark.parametrize(
    "path", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
)
def test_a_load_that_fails_leaves_nothing_to_sample_from(engine, server, weights, path):
    server.broken[path] = 500
    with pytest.raises(EngineError, match=f"weights of version 5 did not arrive: .*broken {path}"):
        engine.load_weights(weights, 5)
    with pytest.raises(EngineError, match="no weights to sample with"):
        engine.generate([ask()])
    assert not server.bodies
    server.broken.clear()
    engine.load_weights(weights, 6)
    assert engine.generate([ask()])[0][0].weight_version == 6


def test_a_load_that_fails_half_way_is_marked_on_the_server_too(engine, server, weights):
    server.broken["/collective_rpc"] = 500
    with pytest.raises(EngineError):
        engine.load_weights(weights, 5)
    assert server.label.endswith("-loading")
    assert server.calls[-1] == "/resume"


def test_a_restarted_server_gets_the_weights_again(engine, server, weights):
    engine.load_weights(weights, 7)

    def restarted(answer: dict) -> str:
        server.label = "default"
        return "drop"

    server.faults = [restarted]
    [[generation]] = engine.generate([ask()])
    assert generation.weight_version == 7
    assert engine.counts == {"connection lost": 1, "weights loaded anew": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "paravt-0123456789ab"}, "serves paravt-0123456789ab, not paravt-.*another model"),
        ({"room": 1000}, "holds 1000 tokens a prompt, but the configuration needs 2000"),
        ({"key": "other"}, f"refuses the key; put the key of that server into {KEY}"),
        ({"raw_logprobs": True}, "log-prob -1.500 for a token that was forced"),
        ({"broken": {"/v1/models": 404}}, "does not know /v1/models"),
    ],
)
def test_another_server_than_expected_is_refused_at_once(server, tmp_path, change, words):
    vars(server).update(change)
    with pytest.raises(EngineError, match=words), connected(tmp_path):
        pass


def test_frames_that_the_server_would_resize_are_noticed_before_the_first_request(server, tmp_path, facts):
    answer = server.answer

    def resized(body: dict) -> dict:
        found = answer(body)
        found["prompt_token_ids"] = [t for t in found["prompt_token_ids"] if t != facts.image_pad_id]
        return found

    server.answer = resized
    with pytest.raises(EngineError, match="must leave frames as they are"), connected(tmp_path):
        pass


def test_named_servers_need_their_key(server, tmp_path, monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(EngineError, match=f"{KEY} is not set"), connected(tmp_path):
        pass


def test_an_address_that_is_none_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setenv(URLS, "localhost:8000")
    with pytest.raises(EngineError, match="write addresses as http://"), connected(tmp_path):
        pass
    monkeypatch.setenv(URLS, server.url.replace("//", "//ann:s3cret@"))
    with (
        pytest.raises(EngineError, match="with a login.*the servers' key into") as caught,
        connected(tmp_path),
    ):
        pass
    assert "s3cret" not in str(caught.value)


def test_several_servers_share_the_work_and_a_prompt_stays_where_it_was(
    server, facts, tmp_path, monkeypatch, weights
):
    with StandIn(facts, tiny_encoder().end_id) as second:
        monkeypatch.setenv(URLS, f"{server.url}, {second.url}/")
        with connected(tmp_path) as engine:
            engine.load_weights(weights, 2)
            assert {server.label, second.label} == {server.label}
            seen = [len(server.bodies), len(second.bodies)]
            requests = [ask(seed=i) for i in range(12)]
            engine.generate(requests)
            shares = [len(server.bodies) - seen[0], len(second.bodies) - seen[1]]
            assert sum(shares) == 12 and min(shares) >= 3  # one prompt twelve times, and still nobody idles
            for _ in range(4):
                engine.generate([ask()])
            alone = [len(server.bodies) - seen[0] - shares[0], len(second.bodies) - seen[1] - shares[1]]
            assert sorted(alone) == [0, 4]


def test_another_server_takes_over_from_one_that_is_gone(server, facts, tmp_path, monkeypatch):
    with StandIn(facts, tiny_encoder().end_id) as second:
        monkeypatch.setenv(URLS, f"{server.url},{second.url}")
        with connected(tmp_path) as engine:
            server.stop()
            answers = engine.generate([ask([float(i)]) for i in range(6)])
            assert all(generation.ids for [generation] in answers)
            assert engine.counts["connection lost"] >= 1


def test_the_async_form_overlaps(engine):
    async def both() -> list:
        return await asyncio.gather(*(engine.generate_async([ask(seed=i)]) for i in range(3)))

    assert [len(answer) for answer in asyncio.run(both())] == [1, 1, 1]


def test_nothing_asked_gives_nothing_and_close_may_be_called_twice(engine, server):
    assert engine.generate([]) == []
    assert not server.calls
    engine.close()
    engine.close()
