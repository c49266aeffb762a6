"""The append-only record: lengths, masks, visual counts, and what is written to disk."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from paravt.conversation import Conversation, ConversationError, Visual

PAD = 7


def visual(time_s: float = 0.0, rows: int = 2, columns: int = 2) -> Visual:
    image = np.zeros((rows * 16, columns * 16, 3), dtype=np.uint8)
    return Visual("clip.mp4", time_s, (1, rows, columns), image)


def test_a_visual_owns_a_quarter_of_its_patches_as_tokens():
    assert visual(rows=2, columns=2).token_count == 1
    assert visual(rows=4, columns=6).token_count == 6


def test_three_sequences_stay_aligned():
    conversation = Conversation(PAD)
    conversation.append_prompt([1, PAD, 2], [visual()])
    conversation.append_sampled([3, 4], [-0.5, -1.5])
    conversation.append_tool_results([5, PAD, PAD], [visual(1.0), visual(2.0)])
    conversation.append_sampled([6], [-0.25])

    assert conversation.ids == [1, PAD, 2, 3, 4, 5, PAD, PAD, 6]
    assert conversation.loss_mask == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert conversation.engine_logprobs == [0, 0, 0, -0.5, -1.5, 0, 0, 0, -0.25]
    assert [v.time_s for v in conversation.visuals] == [0.0, 1.0, 2.0]
    assert conversation.sampled_count == 3


@pytest.mark.parametrize(
    ("ids", "visuals"),
    [([1, 2], [visual()]), ([PAD], []), ([PAD, PAD], [visual()]), ([PAD], [visual(rows=2, columns=4)])],
)
def test_pads_without_frames_and_frames_without_pads_are_refused_whole(ids, visuals):
    conversation = Conversation(PAD)
    conversation.append_prompt([1, 2])
    with pytest.raises(ConversationError, match="nothing was appended"):
        conversation.append_tool_results(ids, visuals)
    assert conversation == Conversation(PAD, [1, 2], [0, 0], [0.0, 0.0], [])


def test_sampled_tokens_need_one_logprob_each_and_no_pads():
    conversation = Conversation(PAD)
    with pytest.raises(ConversationError, match="2 sampled ids, but 1"):
        conversation.append_sampled([1, 2], [-1.0])
    with pytest.raises(ConversationError, match="image pad was sampled"):
        conversation.append_sampled([1, PAD], [-1.0, -1.0])
    assert conversation.ids == []


def test_a_copy_grows_on_its_own_and_shares_the_frames():
    first = Conversation(PAD)
    first.append_prompt([1, PAD], [visual()])
    second = first.copy()
    second.append_sampled([2], [-1.0])
    assert first.ids == [1, PAD] and second.ids == [1, PAD, 2]
    assert first.visuals[0] is second.visuals[0]


segments = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.lists(st.integers(10, 99), max_size=5), st.integers(0, 3)),
        st.tuples(st.just("sampled"), st.lists(st.integers(10, 99), max_size=5), st.just(0)),
    ),
    max_size=8,
)


@given(segments)
def test_old_ids_are_a_prefix_and_json_gives_the_same_record(parts):
    conversation = Conversation(PAD)
    sampled = 0
    for kind, ids, frames in parts:
        before = list(conversation.ids)
        if kind == "prompt":
            conversation.append_prompt(ids + [PAD] * frames, [visual(float(i)) for i in range(frames)])
        else:
            conversation.append_sampled(ids, [-0.125] * len(ids))
            sampled += len(ids)
        assert conversation.ids[: len(before)] == before

    assert conversation.sampled_count == sampled
    assert conversation.ids.count(PAD) == sum(v.token_count for v in conversation.visuals)
    text = json.dumps(conversation.to_json())
    assert all(set(v) == {"video", "time_s", "grid_thw"} for v in json.loads(text)["visuals"])
    again = Conversation.from_json(json.loads(text))
    assert again == conversation
    assert all(v.image is None for v in again.visuals)


def test_a_damaged_record_is_refused():
    conversation = Conversation(PAD)
    conversation.append_prompt([1, PAD], [visual()])
    data = conversation.to_json()
    with pytest.raises(ConversationError, match="differ in length"):
        Conversation.from_json(data | {"loss_mask": [0]})
    with pytest.raises(ConversationError, match="1 image pads"):
        Conversation.from_json(data | {"visuals": []})
