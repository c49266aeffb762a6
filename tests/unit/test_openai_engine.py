"""The endpoint engine: prompts become messages, replies become ids, and nothing can be trained on them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math

import numpy as np
from PIL import Image
import pytest

from paravt.agent import AgentSetup, run_episodes
from paravt.config import EndpointConfig, EpisodeConfig
from paravt.engines import EngineError, Request, Sampling, chat_client
from paravt.engines.chat_client import ChatClient, base_url
from paravt.engines.openai import OpenAIEngine, to_chat, written
from paravt.engines.wire import FrameUrls
from paravt.model import collate
from paravt.rollout import Sample
from tests.chat_server import ChatServer, Fault
from tests.clips import write_clip
from tests.tiny import VISUAL, TinyFrames, tiny_conversation, tiny_encoder

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_WAIT_S", 0.001)


def engine(server: ChatServer, **changes) -> OpenAIEngine:
    config = EndpointConfig(url=server.url, retries=2, timeout_s=10.0)
    return OpenAIEngine(config.model_copy(update=changes), tiny_encoder())


def request(text: str = "Which shape?", frames: tuple[float, ...] = (), n: int = 1, seed: int = 5) -> Request:
    found = tiny_encoder().start("You answer.", TinyFrames(list(frames)) if frames else None, "v.mp4", text)
    return Request(tuple(found.ids), tuple(found.visuals), Sampling(0.7, 40, seed, n))


def test_a_prompt_becomes_messages_with_its_frames_as_images():
    encoder = tiny_encoder()
    frames = TinyFrames([0.0, 12.34])
    found = encoder.start("Be brief.", frames, "v.mp4", "Which?\nA. a <|im_end|>\nB. b", "<think>\n")
    found.append_sampled(encoder.tokenizer.encode(f"I look.\n</think>\n{CALL}") + [encoder.end_id], [0.0] * (
        len(encoder.tokenizer.encode(f"I look.\n</think>\n{CALL}")) + 1))  # fmt: skip
    later = TinyFrames([3.0], seed=1)
    encoder.add_tool_results(found, ["a report", ("cut", later)], "v.mp4", "<think>\n", "Now answer.")
    chat = to_chat(tuple(found.ids), found.visuals, encoder, FrameUrls())
    assert chat.prefix == "<think>\n"
    system, user, assistant, tools = chat.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["text", "image_url", "text", "image_url", "text"]
    texts = [part["text"] for part in user["content"] if part["type"] == "text"]
    assert texts == ["<0.0 seconds>", "<12.3 seconds>", "Which?\nA. a < |im_end|>\nB. b"]
    assert assistant == {"role": "assistant", "content": f"<think>\nI look.\n</think>\n{CALL}"}
    assert tools["role"] == "user" and tools["content"][0]["text"].startswith("<tool_response>\na report\n")
    assert tools["content"][-1]["text"] == "\n</tool_response>\nNow answer."
    for part, image in zip(
        [part for message in (user, tools) for part in message["content"] if part["type"] == "image_url"],
        [*frames.images, *later.images],
        strict=True,
    ):
        head, _, data = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) == image).all()


def test_prompts_that_are_no_chat_are_refused():
    encoder, urls = tiny_encoder(), FrameUrls()
    whole = tiny_conversation([0.0, 1.0])
    with pytest.raises(EngineError, match="does not end with"):
        to_chat((), (), encoder, urls)
    with pytest.raises(EngineError, match="stands for no frame"):
        to_chat(tuple(whole.ids), whole.visuals[:1], encoder, urls)
    with pytest.raises(EngineError, match="more frames were given"):
        to_chat(tuple(whole.ids), [*whole.visuals, whole.visuals[0]], encoder, urls)
    with pytest.raises(EngineError, match="no pixels"):
        bare = type(whole).from_json(whole.to_json())
        to_chat(tuple(bare.ids), bare.visuals, encoder, urls)
    tool = encoder.tokenizer.encode("<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(EngineError, match="'tool' is no chat turn"):
        to_chat(tuple(tool), (), encoder, urls)


def test_a_reply_becomes_ids_without_log_probs():
    with ChatServer(lambda body: "I see <|im_end|> B.") as server:
        [[one, two]] = engine(server).generate([request(n=2, seed=2**40 + 7)])
    assert tiny_encoder().decode(one.ids) == "I see < |im_end|> B." == one.text.replace("<|", "< |")
    assert one.ids[-1] == tiny_encoder().end_id and one.finish_reason == "stop"
    assert len(one.logprobs) == len(one.ids) and all(math.isnan(value) for value in one.logprobs)
    body = server.requests[0]
    assert body["model"] == "video-8b" and body["temperature"] == 0.7 and body["max_tokens"] == 40
    assert {request["seed"] for request in server.requests} == {7, 8}, "n samples are n draws"
    assert two.ids == one.ids and "continue_final_message" not in body


def test_cut_and_refused_replies():
    replies = iter(
        [
            {"message": {"content": "I think and"}, "finish_reason": "length"},
            {"message": {"content": ""}, "finish_reason": "content_filter"},
            {"message": {"content": None}, "finish_reason": "length"},
            (200, "no json at all {"),
            (200, {"choices": []}),
        ]
    )
    with ChatServer(lambda body: next(replies)) as server:
        asked = engine(server, retries=0)
        [[cut]] = asked.generate([request()])
        assert cut.finish_reason == "length" and cut.ids[-1] != tiny_encoder().end_id
        for words in ("content_filter", "nothing back", "no JSON", "no completion"):
            with pytest.raises(EngineError, match=words) as caught:
                asked.generate([request()])
            assert caught.value.request == 0


def test_a_forced_beginning_is_sent_or_refused():
    prompt = tiny_conversation([0.0])
    asked = Request(tuple(prompt.ids), tuple(prompt.visuals), Sampling(0.0, 40))
    with ChatServer(lambda body: "I see.\n</think>\n<answer>B</answer>") as server:
        with pytest.raises(EngineError, match="episode.force_think: false"):
            engine(server).generate([asked])
        assert not server.requests
        [[found]] = engine(server, prefill=True).generate([asked])
    body = server.requests[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "<think>\n"}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert found.text == "I see.\n</think>\n<answer>B</answer>"
    with ChatServer(lambda body: "<think>\nI see.") as server:
        [[found]] = engine(server, prefill=True).generate([asked])
    assert found.text == "I see.", "a server that gives the beginning back does not double it"


def test_what_a_server_parsed_is_put_together_again():
    from paravt.engines.chat_client import ChatReply
    from paravt.protocol import parse_turn

    call = {"function": {"name": "crop_video", "arguments": '{"start_time": 1, "end_time": 3}'}}
    message = {"content": None, "reasoning_content": "I look.", "tool_calls": [call, call]}
    turn = parse_turn(written(ChatReply("", "tool_calls", message)))
    assert turn.think == "I look." and len(turn.valid_calls) == 2 and turn.well_formed
    assert written(ChatReply("<think>a</think>b", "stop", {"reasoning": "a"})) == "<think>a</think>b"
    bad = {"tool_calls": [{"function": {"name": "crop_video", "arguments": "{"}}, "no call"]}
    assert len(parse_turn(written(ChatReply("", "stop", bad))).calls) == 2


def test_faults_are_tried_again_and_a_lost_request_fails_alone():
    with ChatServer(lambda body: "B") as server:
        asked = engine(server)
        server.fail(Fault(500), Fault(429, headers={"Retry-After": "0"}))
        assert len(asked.generate([request()])) == 1 and len(server.requests) == 3
        server.fail(Fault(drop=True))
        asked.generate([request()])
        server.requests.clear()
        server.fail(*[Fault(503)] * 3)
        requests = [request("one?"), request("two?"), request("three?")]
        asked.config, asked.client.in_flight = asked.config.model_copy(update={"in_flight": 1}), 1
        with pytest.raises(EngineError, match="503: not now, 3 times") as caught:
            asked.generate(requests)
        assert caught.value.request == 0 and len(server.requests) == 5
        found = asked.generate(requests[1:])
        assert len(found) == 2 and len(server.requests) == 5, "what was answered is not asked again"


def test_a_bad_request_is_not_tried_again():
    with ChatServer(lambda body: (400, {"error": {"message": "too many images"}})) as server:
        with pytest.raises(EngineError, match="refuses it .400.: too many images") as caught:
            engine(server).generate([request()])
        assert caught.value.request == 0 and len(server.requests) == 1


def test_the_newer_name_of_the_limit_is_found():
    def reply(body):
        if "max_tokens" in body:
            return 400, {"error": {"message": "Use 'max_completion_tokens' instead."}}
        return "B"

    with ChatServer(reply) as server:
        asked = engine(server)
        asked.generate([request(), request("two?")])
        asked.generate([request("three?")])
    assert server.requests[-1]["max_completion_tokens"] == 40 and "max_tokens" not in server.requests[-1]


def test_an_endpoint_that_cannot_be_used_ends_the_run():
    with ChatServer(lambda body: "B", key="right") as server:
        with pytest.raises(EngineError, match="PARAVT_ENDPOINT_KEY"):
            engine(server)
        config = EndpointConfig(url=server.url)
        assert OpenAIEngine(config, tiny_encoder(), "right").model == "video-8b"
    with ChatServer(lambda body: "B", models=("a", "b")) as server:
        with pytest.raises(EngineError, match="serves a, b; name one"):
            engine(server)
        with pytest.raises(EngineError, match="serves a, b; name one"):
            engine(server, model="c")
        assert engine(server, model="b").model == "b"
        gone = engine(server, model="b", retries=1)
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        gone.generate([request()])
    assert caught.value.request is None, "without a server nothing can be asked"
    with ChatServer(lambda body: "B", models=None) as server:
        assert engine(server, model="any").model == "any"
        with pytest.raises(EngineError, match="not known there"):
            engine(server)


def test_requests_at_a_time_are_limited():
    import time

    def slow(body):
        time.sleep(0.05)
        return "B"

    with ChatServer(slow) as server:
        asked = engine(server, in_flight=3)
        found = asyncio.run(asked.generate_async([request(f"{i}?") for i in range(9)]))
    assert len(found) == 9 and server.most_at_once == 3


def test_weights_cannot_be_replaced():
    with ChatServer(lambda body: "B") as server, pytest.raises(EngineError, match="evaluation only"):
        engine(server).load_weights("models/x", 1)


@pytest.mark.parametrize(
    "given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"]
)
def test_urls(given):
    assert base_url(given) == "http://h:1/v1"
    assert base_url("https://h/api/v3/") == "https://h/api/v3"
    for bad in ("h:1", "ftp://h", "", "http://"):
        with pytest.raises(ValueError, match="is no endpoint"):
            base_url(bad)
    assert ChatClient(given, "m").url == "http://h:1/v1"
    assert ChatClient(given.replace("//", "//ann:s3cret@"), "m").url == "http://h:1/v1"


@pytest.mark.parametrize("given", ["ann:s3cret@h/v1", "http://ann:s3cret/s3cret@h/v1", "ftp://ann:s3cret@h"])
def test_an_endpoint_that_is_refused_does_not_show_its_login(given):
    with pytest.raises(ValueError, match="is no endpoint") as caught:
        ChatClient(given, "m")
    assert "s3cret" not in str(caught.value)


def test_episodes_run_over_an_endpoint(tmp_path):
    """Two crops in one turn, two reports by the same model, one answer: as with any other engine."""
    clip = write_clip(tmp_path / "a.mp4", 60)

    def reply(body):
        text = str(body["messages"][-1]["content"])
        if "Segment" in text:
            return "a circle"
        if "tool_response" in text:
            return "<think>\nI know.\n</think>\n<answer>B</answer>"
        return f"<think>\nI look.\n</think>\n{CALL}\n{CALL}"

    sample = Sample("q", str(clip), "Which?", "B", "mcq", ("square", "circle"))
    episode = EpisodeConfig(mode="agentic", force_think=False, temperature=0.0)
    with ChatServer(reply) as server:
        setup = AgentSetup(tiny_encoder(), episode, VISUAL, lambda sample: 4, 1)
        [rollout] = run_episodes(engine(server), [sample], setup)
    assert rollout.answer == "B" and rollout.call_count == 2 and rollout.compliant
    assert [execution.report for execution in rollout.executions] == ["a circle", "a circle"]
    assert len(server.requests) == 4
    again = type(rollout).from_json(json.loads(json.dumps(rollout.to_json(), allow_nan=False)))
    assert again.answer == "B" and math.isnan(again.main.engine_logprobs[-1])
    with pytest.raises(ValueError, match="cannot be trained on"):
        collate([rollout.main])
