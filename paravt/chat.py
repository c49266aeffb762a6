"""Text and frames to tokens: the only place where a conversation is encoded.

The Qwen3-VL chat format, one segment at a time. Each segment is rendered and tokenised alone and appended
to the conversation; what is already there is never rendered again. Segment borders are special tokens, so
tokenising segments apart gives the ids that tokenising the whole would give.

A frame is one image: its time as `<12.3 seconds>`, then vision-start, one image pad per token, vision-end.
SFT, RL, evaluation and `paravt ask` all come through here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import re
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from paravt.config import VisualConfig
from paravt.conversation import MERGE, Conversation, Visual
from paravt.reading.container import VideoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paravt.video import Frames

PATCH = 16  # Qwen3-VL's patch side in pixels
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_RESULT_TAG = re.compile(r"<(?=/?tool_response>)")
SINGLE_TOKENS = ("<|im_start|>", END, VISION_START, IMAGE_PAD, VISION_END, "<|endoftext|>")


def encode_frames(frames: Frames, video: str, config: VisualConfig) -> list[Visual]:
    """Frames [n, H, W, 3] to visuals: sides are multiples of 32 within the pixel limits, aspect kept.

    Raises VideoError for a picture so narrow that the model's image processor takes none of it.
    """
    if not len(frames.images):
        return []
    height, width = frames.images.shape[1:3]
    try:
        new_height, new_width = smart_resize(
            height, width, PATCH * MERGE, config.min_pixels, config.max_pixels
        )
    except ValueError as error:
        raise VideoError("undecodable", f"{video}: frames of {width}x{height} ({error})") from error
    visuals = []
    for image, time_s in zip(frames.images, frames.times_s, strict=True):
        if (new_height, new_width) != (height, width):
            image = np.asarray(
                Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC)
            )
        grid = (1, new_height // PATCH, new_width // PATCH)
        visuals.append(Visual(video, float(time_s), grid, image))
    return visuals


class ChatEncoder:
    """Appends turns to conversations in the chat format of a Qwen3-VL tokenizer.

    `mark` gives the text before frame number i (from 0) of a clip at a time; without it a frame has its time
    as `<12.3 seconds>`, if the configuration says so. Raises ValueError if one of the format's control tokens
    is not a single token of the vocabulary.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        visual: VisualConfig,
        mark: Callable[[int, float], str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.visual = visual
        self.mark = mark
        for token in SINGLE_TOKENS:
            if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
                raise ValueError(f"the tokenizer splits {token}; a Qwen3-VL tokenizer is needed")
        self.image_pad_id: int = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        self.end_id: int = tokenizer.convert_tokens_to_ids(END)
        self.end_ids = frozenset({self.end_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")})

    def start(
        self, system: str | None, frames: Frames | None, video: str, text: str, prefix: str = ""
    ) -> Conversation:
        """A new conversation: system block, user turn (frames, then text), assistant header and prefix."""
        head = f"<|im_start|>system\n{system}{END}\n" if system else ""
        visuals = encode_frames(frames, video, self.visual) if frames is not None else []
        body = self._render_frames(visuals) + self._plain(text)
        conversation = Conversation(self.image_pad_id)
        conversation.append_prompt(self._encode(f"{head}{USER}{body}{END}\n{ASSISTANT}{prefix}"), visuals)
        return conversation

    def add_tool_results(
        self,
        conversation: Conversation,
        results: Sequence[str | Frames | tuple[str, Frames]],
        video: str,
        prefix: str = "",
        text: str = "",
        wrapped: bool = True,
    ) -> None:
        """Append one `<tool_response>` block per result, in call order, as one user turn; then the header.

        A result is a text, frames, or a text with frames after it; no text can end its block. `text` follows
        the blocks in the same user turn. `wrapped` False leaves out the tags, as some published models read
        results.
        """
        visuals: list[Visual] = []
        blocks = []
        for result in results:
            note, frames = result if isinstance(result, tuple) else (result, None)
            if not isinstance(note, str):
                note, frames = "", note
            body = _RESULT_TAG.sub("< ", self._plain(note))
            if frames is not None:
                encoded = encode_frames(frames, video, self.visual)
                visuals += encoded
                body = f"{body}\n" * bool(body) + self._render_frames(encoded)
            blocks.append(f"<tool_response>\n{body}\n</tool_response>" if wrapped else body)
        if text:
            blocks.append(self._plain(text))
        rendered = f"{self._close(conversation)}{USER}{chr(10).join(blocks)}{END}\n{ASSISTANT}{prefix}"
        conversation.append_tool_results(self._encode(rendered), visuals)

    def add_gold(self, conversation: Conversation, text: str) -> None:
        """Append an assistant turn to be learned: `text` follows the prefix; the end token is learned too."""
        ids = self._encode(text) + [self.end_id]
        conversation.append_sampled(ids, [0.0] * len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids; the end-of-turn token is left out, all other tags are kept."""
        return self.tokenizer.decode([token for token in ids if token not in self.end_ids])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _close(self, conversation: Conversation) -> str:
        """What closes the assistant turn: one cut at the token limit gets the end token it did not write."""
        ended = bool(conversation.ids) and conversation.ids[-1] == self.end_id
        return "\n" if ended else f"{END}\n"

    def _render_frames(self, visuals: Sequence[Visual]) -> str:
        return "".join(
            self._mark(number, visual.time_s) + VISION_START + IMAGE_PAD * visual.token_count + VISION_END
            for number, visual in enumerate(visuals)
        )

    def _mark(self, number: int, time_s: float) -> str:
        if self.mark is not None:
            return self.mark(number, time_s)
        return f"<{time_s:.1f} seconds>" if self.visual.time_marks else ""

    def tools_block(self, schema: dict) -> str:
        """What the model's own chat template says about a tool. Raises ValueError if it takes none."""
        template = getattr(self.tokenizer, "chat_template", None)
        rendered = ""
        if template:
            messages = [{"role": "user", "content": "?"}]
            rendered = self.tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
        system = rendered.partition("<|im_start|>system\n")[2].partition(END)[0]
        if "<tools>" not in system:
            raise ValueError(
                "the tokenizer's chat template takes no tools; give the folder of the model itself "
                "(--tokenizer for an endpoint)"
            )
        return system

    @staticmethod
    def _plain(text: str) -> str:
        """Text of a question or a report, unable to forge the format's control tokens."""
        return text.replace("<|", "< |")
