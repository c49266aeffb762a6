"""Generation in this process, on the model that is being trained.

    token t of sample i = smallest v with  CDF_t(v) > u_it * CDF_t(V),   u_i = uniforms(hash(seed, i))

The uniforms belong to the request, not to the batch: which neighbours a row has, and when they finish,
changes nothing but float rounding. Probabilities come from `model.sampling_logits`, the function that the
trainer uses, so the returned log-probs are those of the distribution that was sampled from.

How it is made fast without a server:

    prefix sharing   requests with the same prompt are one row while the frames and the prompt are encoded;
                     the row's keys and values are repeated afterwards, once a sample
    prefill          prompts are padded on the right, so that plain causal attention needs no mask
    decoding         new tokens stand after the padding in every row; keys and values lie in buffers that are
                     written in place; logits are computed at the last position only
    finished rows    leave the batch when a quarter of it is done
    batches          prompts of similar length, under a budget of tokens
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
import hashlib
import threading
import time

import torch
from transformers import Cache, DynamicCache, Qwen3VLForConditionalGeneration

from paravt.conversation import Visual
from paravt.engines.base import EngineError, Generation, Request, Sampling, refusal
from paravt.model import load_model, rope_positions, sampling_logits, visual_features

GROW = 128  # new columns of the key and value buffers, at least
KEEP_SHARE = 0.75  # rows are gathered anew when at most this share of them still writes
MAX_PADDING = 0.5  # of the prompt tokens of a batch


@dataclass
class _Prompt:
    """A distinct prompt and who asked for it: `takers` are (request, sample index within it)."""

    ids: tuple[int, ...]
    visuals: tuple[Visual, ...]
    temperature: float
    takers: list[tuple[int, int]]


class _Buffers(Cache):
    """Keys and values of all layers, [rows, heads, columns, head size], written in place column by column."""

    def __init__(self, prefilled: DynamicCache, repeats: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.used = prefilled.get_seq_length()
        self._pairs = [
            [self._widened(x.repeat_interleave(repeats, dim=0), GROW) for x in (layer.keys, layer.values)]
            for layer in prefilled.layers
        ]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write one column; the caller moves `used` on when all layers have written."""
        pair = self._pairs[layer_idx]
        if pair[0].shape[2] == self.used:
            pair[:] = [self._widened(part, max(GROW, self.used // 2)) for part in pair]
        for part, states in zip(pair, (key_states, value_states), strict=True):
            part[:, :, self.used : self.used + 1] = states
        return tuple(part[:, :, : self.used + 1] for part in pair)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def keep(self, rows: torch.Tensor) -> None:
        self._pairs = [[part.index_select(0, rows) for part in pair] for pair in self._pairs]

    @staticmethod
    def _widened(part: torch.Tensor, columns: int) -> torch.Tensor:
        rows, heads, used, size = part.shape
        wide = part.new_empty(rows, heads, used + columns, size)
        wide[:, :, :used] = part
        return wide


class TransformersEngine:
    """The Engine protocol on a Qwen3-VL model of this process.

    `end_ids` end a turn (`ChatEncoder.end_ids`); `max_batch_tokens` bounds rows x padded prompt length of one
    batch, a row being one sample (a single prompt may exceed it). The model is used as it is: a trainer that
    updates its weights sets `weight_version` to match. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        end_ids: Collection[int],
        max_batch_tokens: int = 65_536,
        device: torch.device | str | None = None,
        weight_version: int = 0,
    ) -> None:
        self.model = model if device is None else model.to(device)
        self.end_ids = sorted(end_ids)
        self.max_batch_tokens = max_batch_tokens
        self.weight_version = weight_version
        self.counts: Counter[str] = Counter()  # nothing fails here that could be tried again
        self._lock = threading.Lock()

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        """Answer `requests` in order. Raises EngineError, before any work, for one that cannot be served, and
        for weights whose logits are not finite.
        """
        for number, request in enumerate(requests):
            self._check(number, request)
        answers: list[list[Generation | None]] = [[None] * request.sampling.n for request in requests]
        with self._lock, torch.inference_mode():
            training = self.model.training
            self.model.eval()  # in training mode, gradient checkpointing would drop the cache
            try:
                for batch in self._batches(_distinct(requests)):
                    for (number, sample), generation in self._run(batch, requests):
                        answers[number][sample] = generation
            finally:
                self.model.train(training)
        return answers

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        return await asyncio.to_thread(self.generate, requests)

    def load_weights(self, folder: str, version: int) -> None:
        """Copy the weights of a model folder into the model in place; later generations carry `version`."""
        loaded = load_model(folder, self.model.dtype)
        with self._lock:
            try:
                self.model.load_state_dict(loaded.state_dict())
            except RuntimeError as error:
                raise EngineError(f"the weights in {folder} are of another model: {error}") from error
            self.weight_version = version

    @property
    def _context(self) -> int:
        return self.model.config.text_config.max_position_embeddings

    def _check(self, number: int, request: Request) -> None:
        config = self.model.config
        vocabulary = config.text_config.vocab_size
        problem = refusal(request, config.image_token_id, vocabulary, self._context)
        if problem:
            raise EngineError(f"request {number}: {problem}", request=number)

    def _batches(self, prompts: Sequence[_Prompt]) -> Iterator[list[_Prompt]]:
        """Longest first; a batch has one temperature, and is closed by the budget or by too much padding."""
        batch: list[_Prompt] = []
        rows = tokens = 0
        for prompt in sorted(prompts, key=lambda prompt: (prompt.temperature, -len(prompt.ids))):
            samples = len(prompt.takers)
            if batch:
                padded = (rows + samples) * len(batch[0].ids)
                filled = tokens + samples * len(prompt.ids)
                if (
                    prompt.temperature != batch[0].temperature
                    or padded > self.max_batch_tokens
                    or filled < (1 - MAX_PADDING) * padded
                ):
                    yield batch
                    batch, rows, tokens = [], 0, 0
            batch.append(prompt)
            rows += samples
            tokens += samples * len(prompt.ids)
        if batch:
            yield batch

    def _run(
        self, prompts: list[_Prompt], requests: list[Request]
    ) -> list[tuple[tuple[int, int], Generation]]:
        started = time.perf_counter()
        samplings = [requests[number].sampling for prompt in prompts for number, _ in prompt.takers]
        takers = [taker for prompt in prompts for taker in prompt.takers]
        room = [self._context - len(prompt.ids) for prompt in prompts for _ in prompt.takers]
        limits = [min(sampling.max_new_tokens, free) for sampling, free in zip(samplings, room, strict=True)]
        uniforms = None
        if prompts[0].temperature > 0:
            uniforms = _uniforms(
                [(sampling.seed, sample) for sampling, (_, sample) in zip(samplings, takers, strict=True)],
                max(limits),
            )
        hidden, cache, attended, positions = self._prefill(prompts)
        ids, logprobs, lengths = self._decode(
            hidden, cache, attended, positions, torch.tensor(limits), uniforms, prompts[0].temperature
        )
        seconds = time.perf_counter() - started
        results = []
        for row, taker in enumerate(takers):
            written = ids[row, : lengths[row]].tolist()
            reason = "stop" if written[-1] in self.end_ids else "length"
            values = logprobs[row, : lengths[row]].tolist()
            results.append((taker, Generation(written, values, reason, self.weight_version, seconds)))
        return results

    def _prefill(self, prompts: list[_Prompt]) -> tuple[torch.Tensor, _Buffers, torch.Tensor, torch.Tensor]:
        """Encode each prompt once, then repeat it once a sample.

        Returns the last hidden state [rows, hidden], the cache, which of its columns each row may attend to
        [rows, columns], and each row's next free position [rows].
        """
        device = self.model.device
        image_pad = self.model.config.image_token_id
        lengths = [len(prompt.ids) for prompt in prompts]
        width = max(lengths)
        ids = torch.full((len(prompts), width), self.end_ids[0])  # any token but an image pad
        positions = torch.zeros(3, len(prompts), width, dtype=torch.long)
        following = torch.zeros(len(prompts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt.ids)
            block, free = rope_positions(prompt.ids, prompt.visuals, image_pad)
            positions[:, row, : lengths[row]] = torch.from_numpy(block)
            following[row] = free
        cache = DynamicCache(config=self.model.config.text_config)
        hidden = self.model.model(
            input_ids=ids.to(device),
            attention_mask=None,  # padding is on the right: causal attention never looks at it
            position_ids=positions.to(device),
            mm_encoder_outputs=visual_features(
                self.model, [visual for prompt in prompts for visual in prompt.visuals]
            ),
            past_key_values=cache,
            use_cache=True,
        )[0]
        last = torch.tensor(lengths, device=device)
        repeats = torch.tensor([len(prompt.takers) for prompt in prompts], device=device)
        hidden = hidden[torch.arange(len(prompts), device=device), last - 1]
        attended = torch.arange(width, device=device) < last[:, None]
        return (
            hidden.repeat_interleave(repeats, dim=0),
            _Buffers(cache, repeats),
            attended.repeat_interleave(repeats, dim=0),
            following.to(device).repeat_interleave(repeats),
        )

    def _decode(
        self,
        hidden: torch.Tensor,
        cache: _Buffers,
        attended: torch.Tensor,
        positions: torch.Tensor,
        limits: torch.Tensor,
        uniforms: torch.Tensor | None,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write until each row has sampled an end token or reached its limit: ids, log-probs, lengths."""
        device = hidden.device
        language, embed = self.model.model.language_model, self.model.get_input_embeddings()
        ends = torch.tensor(self.end_ids, device=device)
        longest = int(limits.max())
        limits = limits.to(device)
        ids = torch.zeros(len(hidden), longest, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(hidden), longest, device=device)
        lengths = torch.zeros(len(hidden), dtype=torch.long, device=device)
        if uniforms is not None:
            uniforms = uniforms.to(device)
        mask = torch.cat([attended, attended.new_ones(len(hidden), longest)], dim=1)[:, None, None]
        rows = torch.arange(len(hidden), device=device)  # where the live rows stand in the results
        writing = torch.ones_like(rows, dtype=torch.bool)
        for step in range(longest):
            scores = sampling_logits(self.model, hidden, temperature).log_softmax(-1)
            if scores[:, 0].isnan().any():  # one logit that is no number makes its whole row NaN
                raise EngineError(
                    f"the weights of version {self.weight_version} give logits that are not finite; go back "
                    "to a checkpoint before them"
                )
            chosen = scores.argmax(-1) if uniforms is None else inverse_cdf(scores, uniforms[rows, step])
            live = rows[writing]
            ids[live, step] = chosen[writing]
            logprobs[live, step] = scores.gather(-1, chosen[:, None])[writing, 0]
            lengths[live] = step + 1
            writing = writing & ~torch.isin(chosen, ends) & (limits[rows] > step + 1)
            remaining = int(writing.sum())
            if remaining == 0:
                break
            if remaining <= KEEP_SHARE * len(rows):
                kept = writing.nonzero()[:, 0]
                cache.keep(kept)
                chosen, rows, positions, mask = chosen[kept], rows[kept], positions[kept], mask[kept]
                writing = writing[kept]
            hidden = language(
                inputs_embeds=embed(chosen[:, None]),
                position_ids=(positions + step).expand(3, -1)[..., None],
                attention_mask=mask[..., : cache.used + 1],
                past_key_values=cache,
                use_cache=True,
            )[0][:, 0]
            cache.used += 1
        return ids.cpu(), logprobs.cpu(), lengths.cpu()


def inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [rows] drawn from log-probs [rows, vocabulary] by float64 uniforms [rows] in [0, 1).

    A token of probability 0 is never drawn.
    """
    cumulated = logprobs.double().exp_().cumsum_(-1)
    total = cumulated[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True)[:, 0]


def _uniforms(keys: Sequence[tuple[int, int]], count: int) -> torch.Tensor:
    """Float64 [rows, count]: each row's own stream, a function of (seed, sample index) alone."""
    table = torch.empty(len(keys), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, key in enumerate(keys):
        digest = hashlib.sha256(repr(key).encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        table[row] = torch.rand(count, generator=generator, dtype=torch.float64)
    return table


def _distinct(requests: Sequence[Request]) -> list[_Prompt]:
    """Requests of the same tokens, frames (the same objects) and temperature become one prompt."""
    prompts: dict[tuple, _Prompt] = {}
    for number, request in enumerate(requests):
        sampling: Sampling = request.sampling
        key = (request.ids, tuple(id(visual) for visual in request.visuals), sampling.temperature)
        prompt = prompts.setdefault(key, _Prompt(request.ids, request.visuals, sampling.temperature, []))
        prompt.takers += [(number, sample) for sample in range(sampling.n)]
    return list(prompts.values())
