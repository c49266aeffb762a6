"""The Qwen3-VL model: loading and saving, batches of conversations, log-probs of their tokens.

    policy_logprobs[b, t] = log softmax(logits[b, t-1] / temperature)[ids[b, t]]

in float32 over the whole vocabulary, the support that engines sample from, less the control tokens that no
engine may sample. Frames that occur several times in a batch (the episodes of a group share theirs) pass
through the vision tower once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
import shutil

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from paravt.chat import PATCH, ChatEncoder
from paravt.config import VisualConfig
from paravt.conversation import MERGE, UNSAMPLED_FIELDS, Conversation, Visual
from paravt.segments import NAME as SEGMENTS
from paravt.weights import real_folder

LOGITS_AT_ONCE = 2**28  # numbers; with the copies that a loss needs, 4 GiB

COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


class ModelFolderError(ValueError):
    """A folder that is not a whole model; the message names what is missing."""


def check_folder(folder: str | Path) -> Path:
    """The folder, or the one with the weights it names. Raises ModelFolderError naming what is missing."""
    folder = real_folder(folder)
    weights = list(folder.glob("*.safetensors"))
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not weights:
        missing.append("*.safetensors")
    if missing:
        raise ModelFolderError(f"{folder} is not a complete model folder: no {', '.join(missing)}")
    return folder


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> Qwen3VLForConditionalGeneration:
    """The model on the CPU, in eval mode, from a local folder. `attention` is sdpa or flash_attention_2."""
    return Qwen3VLForConditionalGeneration.from_pretrained(
        check_folder(folder), dtype=dtype, attn_implementation=attention, local_files_only=True
    ).eval()


def load_encoder(folder: str | Path, visual: VisualConfig) -> ChatEncoder:
    """The chat encoder of a model folder's own tokenizer."""
    return ChatEncoder(AutoTokenizer.from_pretrained(check_folder(folder), local_files_only=True), visual)


def save_model(
    model: Qwen3VLForConditionalGeneration,
    source: str | Path,
    target: str | Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Weights and config to `target`, with the tokenizer and processor files of `source` beside them.

    `weights` replace the model's own, where those are split over processes or carry adapters.
    """
    target = Path(target)
    model.save_pretrained(target, state_dict=weights)
    for name in COMPANION_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def rope_positions(
    ids: Sequence[int], visuals: Sequence[Visual], image_pad_id: int
) -> tuple[np.ndarray, int]:
    """M-RoPE positions int64 [3, len(ids)] and the next free position.

    Text advances all three axes by one. A frame is a block at (p, p + row, p + column) over its merged grid;
    after it the counter goes on at p + max(rows, columns) (transformers' get_rope_index).
    """
    ids = np.asarray(ids)
    positions = np.zeros((3, len(ids)), dtype=np.int64)
    cursor = counter = 0
    pads = np.flatnonzero(ids == image_pad_id)
    taken = 0
    for visual in visuals:
        _, rows, columns = visual.grid_thw
        rows, columns = rows // MERGE, columns // MERGE
        start = int(pads[taken])
        taken += rows * columns
        text = start - cursor
        positions[:, cursor:start] = counter + np.arange(text)
        counter += text
        row, column = np.divmod(np.arange(rows * columns), columns)
        block = np.stack([np.zeros_like(row), row, column]) + counter
        positions[:, start : start + rows * columns] = block
        cursor = start + rows * columns
        counter += max(rows, columns)
    positions[:, cursor:] = counter + np.arange(len(ids) - cursor)
    return positions, counter + len(ids) - cursor


def patchify(images: Sequence[np.ndarray]) -> torch.Tensor:
    """uint8 images [H, W, 3] to patches float32 [sum of grids, 3 * 2 * 16 * 16], values in [-1, 1].

    The order is the image processor's: patches of one merged token are neighbours; a still image fills
    both steps of the temporal patch.
    """
    patches = []
    for image in images:
        rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
        pixels = image.astype(np.float32) / 127.5 - 1.0
        tiles = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
        tiles = tiles.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH, PATCH)
        patches.append(np.repeat(tiles, 2, axis=2).reshape(rows * columns, -1))
    return torch.from_numpy(np.concatenate(patches))


def visual_features(model: Qwen3VLForConditionalGeneration, visuals: Sequence[Visual]) -> dict:
    """Vision-tower outputs for `visuals` in order, to hand to the model as `mm_encoder_outputs`.

    A frame that several conversations share (the same Visual object) is encoded once.
    """
    if not visuals:
        return {}
    unique = {id(visual): visual for visual in visuals}
    slot = {key: position for position, key in enumerate(unique)}
    grids = torch.tensor([visual.grid_thw for visual in unique.values()], device=model.device)
    pixels = patchify([_pixels(visual) for visual in unique.values()]).to(model.device)
    output = model.get_image_features(pixels, grids, return_dict=True)
    order = [slot[id(visual)] for visual in visuals]
    output.pooler_output = [output.pooler_output[i] for i in order]
    output.deepstack_features = [[level[i] for i in order] for level in output.deepstack_features]
    return {"image": output}


def _pixels(visual: Visual) -> np.ndarray:
    if visual.image is None:
        raise ValueError(
            f"frame {visual.time_s:.3f} s of {visual.video} has no pixels; decode it again first"
        )
    return visual.image


@dataclass(frozen=True)
class Batch:
    """Conversations side by side, padded on the right; or one after the other in a single row.

    `input_ids`, `attention_mask`, `loss_mask` are int64 [B, T]; `position_ids` int64 [3, B, T];
    `engine_logprobs` float32 [B, T]; `visuals` are all frames, row by row. In a row of several conversations
    `segments` are their lengths, `attention_mask` is None and `position_ids` int64 [4, 1, T]: the first axis
    counts each conversation's tokens from 0, from which transformers reads where one ends.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    engine_logprobs: torch.Tensor
    visuals: tuple[Visual, ...]
    segments: tuple[int, ...] | None = None

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.to(device) if torch.is_tensor(v) else v for k, v in moved.items()})


def collate(conversations: Sequence[Conversation]) -> Batch:
    """A Batch of the conversations, in order. Pad tokens are id 0 with attention, loss and position 0.

    Raises ValueError for a sampled token without a log-prob: those of an endpoint are for evaluation only.
    """
    shape = (len(conversations), max(len(conversation.ids) for conversation in conversations))
    ids, attention, loss = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    logprobs = np.zeros(shape, dtype=np.float32)
    positions = np.zeros((3, *shape), dtype=np.int64)
    for row, conversation in enumerate(conversations):
        length = len(conversation.ids)
        ids[row, :length] = conversation.ids
        attention[row, :length] = 1
        loss[row, :length] = conversation.loss_mask
        logprobs[row, :length] = conversation.engine_logprobs
        positions[:, row, :length], _ = rope_positions(
            conversation.ids, conversation.visuals, conversation.image_pad_id
        )
    if np.isnan(logprobs).any():
        raise ValueError(
            "a sampled token has no log-prob: episodes of an endpoint cannot be trained on; sample with "
            "engine transformers or vllm"
        )
    arrays = (ids, attention, positions, loss, logprobs)
    visuals = tuple(visual for conversation in conversations for visual in conversation.visuals)
    return Batch(*(torch.from_numpy(array) for array in arrays), visuals)


def pack(conversations: Sequence[Conversation]) -> Batch:
    """A Batch of one row that holds the conversations one after the other; none attends to another."""
    parts = [
        np.concatenate(
            [
                np.arange(len(conversation.ids))[None],
                rope_positions(conversation.ids, conversation.visuals, conversation.image_pad_id)[0],
            ]
        )
        for conversation in conversations
    ]

    def row(name: str, dtype: type) -> torch.Tensor:
        joined = np.concatenate([np.asarray(getattr(c, name), dtype=dtype) for c in conversations])
        return torch.from_numpy(joined[None])

    return Batch(
        row("ids", np.int64),
        None,
        torch.from_numpy(np.concatenate(parts, axis=1)[:, None]),
        row("loss_mask", np.int64),
        row("engine_logprobs", np.float32),
        tuple(visual for conversation in conversations for visual in conversation.visuals),
        tuple(len(conversation.ids) for conversation in conversations),
    )


def blank_batch() -> Batch:
    """Two tokens of nothing: a pass that gives no loss, for a process that waits for the others."""
    row = torch.ones(1, 2, dtype=torch.long)
    positions = torch.tensor([[0, 1]]).expand(3, 1, 2).contiguous()
    return Batch(0 * row, row, positions, 0 * row, torch.zeros(1, 2), ())


def unsampled_ids(model: Qwen3VLForConditionalGeneration) -> list[int]:
    """Vision control tokens: a sampled one would have no frame behind it, so they are outside the support."""
    ids = (getattr(model.config, name) for name in UNSAMPLED_FIELDS)
    return sorted({i for i in ids if 0 <= i < model.config.text_config.vocab_size})


def sampling_logits(
    model: Qwen3VLForConditionalGeneration, hidden: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Logits float32 [..., vocabulary] of the very distribution that is sampled from.

    One function for engine and trainer: temperature (0 counts as 1) and support are equal by construction.
    """
    logits = model.lm_head(hidden)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / (temperature or 1.0)
    logits[..., unsampled_ids(model)] = -torch.inf
    return logits


@dataclass(frozen=True)
class TokenScores:
    """What a forward pass says of each sampled token; [B, T] in the logits' dtype, 0 off the loss mask.

    `top` is 1 where the token is the likeliest one.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top: torch.Tensor


def _attention_words(model: Qwen3VLForConditionalGeneration, batch: Batch) -> dict:
    """What attention by segments is told; other kinds read the borders from the positions."""
    by_segments = batch.segments and model.config.text_config._attn_implementation == SEGMENTS
    return {"segments": batch.segments} if by_segments else {}


def _score_rows(
    model: Qwen3VLForConditionalGeneration,
    hidden: torch.Tensor,
    sampled: torch.Tensor,
    temperature: float,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and rank [n] of `sampled` [n, 1] by hidden states [n, size]."""
    all_logprobs = sampling_logits(model, hidden, temperature).log_softmax(-1)
    chosen = all_logprobs.gather(-1, sampled).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(all_logprobs.exp() * all_logprobs.clamp_min(-1e4)).sum(-1)
    top = (all_logprobs.detach().argmax(-1) == sampled.squeeze(-1)).float()
    return chosen, entropy, top


def token_scores(
    model: Qwen3VLForConditionalGeneration, batch: Batch, temperature: float, entropy_grad: bool = False
) -> TokenScores:
    """Log-prob, entropy and rank of each sampled token. Entry t belongs to ids[t], given ids[< t].

    Logits are computed at loss positions only, LOGITS_AT_ONCE of them at a time. The entropy carries a
    gradient only if asked for.
    """
    hidden = model.model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        mm_encoder_outputs=visual_features(model, batch.visuals),
        use_cache=False,
        **_attention_words(model, batch),
    )[0]
    wanted = batch.loss_mask[:, 1:].bool()
    hidden, sampled = hidden[:, :-1][wanted], batch.input_ids[:, 1:][wanted].unsqueeze(-1)
    at_once = max(1, LOGITS_AT_ONCE // model.config.text_config.vocab_size)
    if len(hidden) <= at_once:
        parts = [_score_rows(model, hidden, sampled, temperature, entropy_grad)]
    else:  # no more than that many logits are ever held: the backward pass works them out again
        parts = [
            checkpoint(_score_rows, model, rows, ids, temperature, entropy_grad, use_reentrant=False)
            for rows, ids in zip(hidden.split(at_once), sampled.split(at_once), strict=True)
        ]
    chosen, entropy, top = (torch.cat(values) for values in zip(*parts, strict=True))
    where = batch.loss_mask.bool().clone()
    where[:, 0] = False
    zeros = torch.zeros(batch.input_ids.shape, dtype=chosen.dtype, device=chosen.device)
    scores = (zeros.masked_scatter(where, values.to(zeros.dtype)) for values in (chosen, entropy, top))
    return TokenScores(*scores)


class Scorer(torch.nn.Module):
    """`token_scores` as a module whose forward pass accelerate can wrap; the model keeps its names below it.

    `whole_graph`: each pass reaches every trained weight, frames or not. Processes that sum gradients or put
    weights together need that, for they meet once for each weight.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration, whole_graph: bool = False) -> None:
        super().__init__()
        self.model = model
        self.whole_graph = whole_graph

    def forward(
        self, batch: Batch, temperature: float, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropy and rank, as in TokenScores: a tuple, so that wrappers find the tensors."""
        scores = token_scores(self.model, batch, temperature, entropy_grad)
        logprobs = scores.logprobs
        if self.whole_graph and not batch.visuals:
            unused = [weight for weight in self.model.model.visual.parameters() if weight.requires_grad]
            logprobs = logprobs + sum(0 * weight.sum() for weight in unused)
        return logprobs, scores.entropy, scores.top


def token_logprobs(
    model: Qwen3VLForConditionalGeneration, batch: Batch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each sampled token and entropy of its distribution, both float32 [B, T]."""
    scores = token_scores(model, batch, temperature)
    return scores.logprobs, scores.entropy
