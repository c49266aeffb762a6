"""Token in, token out: the one record of what a model read and wrote.

A conversation only ever grows. The ids that were sent to an engine are the ids that are trained on: a new
turn is tokenised alone and appended, so the old ids are always a prefix of the new ones. Nothing is rendered
or tokenised a second time.

Three aligned sequences describe each token:

    ids               the token
    loss_mask         1 exactly where the model sampled the token, else 0
    engine_logprobs   log-prob under the sampling distribution where loss_mask is 1, else 0.0

Frames enter as `Visual`s. Each visual owns a run of image-pad tokens; pads and visuals are counted against
each other at each append, so a tool result is taken whole or refused whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan

import numpy as np

MERGE = 2  # Qwen3-VL joins 2 x 2 patches into one token

# Fields of a model's config. A sampled control token would have no frame behind it: no engine may sample one.
UNSAMPLED_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Visual:
    """One frame as the model sees it.

    `image` is uint8 [height, width, 3], already resized; it is None in a conversation that was read from
    disk, since only the file and the time are written. `grid_thw` counts patches (1, rows, columns).
    """

    video: str
    time_s: float
    grid_thw: tuple[int, int, int]
    image: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def token_count(self) -> int:
        t, h, w = self.grid_thw
        return t * h * w // MERGE**2


class ConversationError(ValueError):
    """An append whose lengths or visual counts do not fit together."""


@dataclass
class Conversation:
    """An append-only token sequence with its loss mask, engine log-probs and frames."""

    image_pad_id: int
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    visuals: list[Visual] = field(default_factory=list)

    def append_prompt(self, ids: list[int], visuals: list[Visual] | tuple[Visual, ...] = ()) -> None:
        """Append tokens that were given to the model, not written by it.

        Raises ConversationError unless the image pads among `ids` are exactly those of `visuals`.
        """
        pads = sum(token == self.image_pad_id for token in ids)
        needed = sum(visual.token_count for visual in visuals)
        if pads != needed:
            raise ConversationError(
                f"{pads} image pads in the tokens, but {len(visuals)} visuals that need {needed}; "
                "nothing was appended"
            )
        self.ids.extend(ids)
        self.loss_mask.extend([0] * len(ids))
        self.engine_logprobs.extend([0.0] * len(ids))
        self.visuals.extend(visuals)

    def append_tool_results(self, ids: list[int], visuals: list[Visual] | tuple[Visual, ...] = ()) -> None:
        """Append what the tools returned; the same bookkeeping as a prompt, named for the reader."""
        self.append_prompt(ids, visuals)

    def append_sampled(self, ids: list[int], engine_logprobs: list[float]) -> None:
        """Append tokens that the model sampled, each with its log-prob under the sampling distribution.

        Raises ConversationError if the lengths differ. A sampled image pad has no frame behind it: it is
        refused, since the trainer could not tell it from a real one.
        """
        if len(ids) != len(engine_logprobs):
            raise ConversationError(f"{len(ids)} sampled ids, but {len(engine_logprobs)} log-probs")
        if self.image_pad_id in ids:
            raise ConversationError("an image pad was sampled; engines must mask that token out")
        self.ids.extend(ids)
        self.loss_mask.extend([1] * len(ids))
        self.engine_logprobs.extend(engine_logprobs)

    @property
    def sampled_count(self) -> int:
        """How many tokens the model wrote: the sum of the mask, never a distance between positions."""
        return sum(self.loss_mask)

    def copy(self) -> Conversation:
        """An independent conversation with the same history; frames are shared, they are never changed."""
        return Conversation(
            self.image_pad_id,
            list(self.ids),
            list(self.loss_mask),
            list(self.engine_logprobs),
            list(self.visuals),
        )

    def to_json(self) -> dict:
        """Everything but pixels: a frame is written as its file, time and grid. A log-prob that is not known
        (an endpoint gives none) is NaN here and null there.
        """
        return {
            "image_pad_id": self.image_pad_id,
            "ids": self.ids,
            "loss_mask": self.loss_mask,
            "engine_logprobs": [None if value != value else value for value in self.engine_logprobs],
            "visuals": [
                {"video": v.video, "time_s": v.time_s, "grid_thw": list(v.grid_thw)} for v in self.visuals
            ],
        }

    @classmethod
    def from_json(cls, data: dict) -> Conversation:
        visuals = [Visual(v["video"], v["time_s"], tuple(v["grid_thw"])) for v in data["visuals"]]
        conversation = cls(data["image_pad_id"])
        lengths = {len(data[key]) for key in ("ids", "loss_mask", "engine_logprobs")}
        if len(lengths) != 1:
            raise ConversationError(f"ids, loss_mask and engine_logprobs differ in length: {sorted(lengths)}")
        conversation.append_prompt(data["ids"], visuals)
        conversation.loss_mask = list(data["loss_mask"])
        conversation.engine_logprobs = [nan if value is None else value for value in data["engine_logprobs"]]
        return conversation
