"""Memory per GPU and steps per hour of a training, before anyone rents the GPUs.

Memory is a sum of parts, each from the configuration and the sizes of the architecture (`architecture`):

    weights       trained ones in 4 bytes, frozen ones in train.dtype, over the processes if split
    gradients     4 bytes a trained weight; optimiser 8 (two moments)
    gathered      what is whole for a while where weights are split: embedding, head, vision tower and two
                  layers in train.dtype, and the gradients of embedding and head before they are summed
    reference     the frozen start of RL's KL, in train.dtype; none with adapters (they are switched off)
    activations   of one micro-batch: the input of each layer and the inside of one, with checkpointing
    logits        of the loss positions that are worked on at once, float32 copies included
    visual        pixels, the tower's inside and its outputs, for the frames of one micro-batch
    reserve       CUDA context and what the allocator cannot use

The parts do not all peak together, so the sum is an upper bound. Times are arithmetic on assumptions
(`Assumptions`) that were not measured here; they are printed beside the result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from paravt.architecture import QWEN3_VL_8B, Architecture
from paravt.config import Params, VLLMEngineConfig

GIB = 2**30
MARK_TOKENS = 9  # `<12.3 seconds>` with the borders of a frame
LOGITS_AT_ONCE = 2**28  # elements; `model.token_scores` cuts there


@dataclass(frozen=True)
class Layout:
    """GPUs of one machine."""

    name: str
    gpus: int
    gpu_gib: float


# 80 GB as drivers report them: 79.2 GiB of an A100 or H100 can be used
LAYOUTS = {
    layout.name: layout
    for layout in (Layout("8x80", 8, 79.2), Layout("4x80", 4, 79.2), Layout("1x80", 1, 79.2))
}


@dataclass(frozen=True)
class Assumptions:
    """What times are worked out from: an H100 SXM, and a guess of what episodes are like."""

    tflops: float = 989.0
    """Dense 16-bit peak of a GPU."""
    utilisation: float = 0.35
    """Share of the peak that training reaches."""
    text_tokens: int = 800
    """Of a prompt beside its frames: system text, question, options."""
    sft_sample_tokens: int = 2600
    """Of a training sample, frames included: 32 rows of 8192 hold about a hundred."""
    written_tokens: int = 500
    """That an episode writes, over all its turns."""
    calls: float = 1.0
    """Crops of an episode; the sub-agent reads 16 frames and writes 150 tokens for each."""
    decode_tokens_per_s: float = 2500.0
    """Of all sequences of one server together."""
    video_s: float = 2.0
    """Seconds of one CPU core to read the frames of a prompt."""
    readers: int = 4
    """Videos that a process reads at the same time."""
    disk_gb_per_s: float = 2.0
    copy_gb_per_s: float = 5.0
    """Of weights that are sent, between GPU and host and over the group alike."""


@dataclass(frozen=True)
class Use:
    """One kind of GPU: GiB by part, what it has, and notes for the reader."""

    what: str
    gib: dict[str, float]
    has_gib: float
    notes: tuple[str, ...] = ()

    @property
    def total_gib(self) -> float:
        return sum(self.gib.values())

    @property
    def fits(self) -> bool:
        return self.total_gib <= self.has_gib


ROLLOUT_PARTS = ("video", "read", "write")


@dataclass(frozen=True)
class Plan:
    layout: Layout
    uses: tuple[Use, ...]
    visual_tokens: dict[int, int]
    seconds: dict[str, dict[str, float]]
    disk_gib: dict[str, float]
    assumptions: Assumptions = field(default_factory=Assumptions)
    overlaps: bool = False
    """Whether the next steps are rolled out while the trainer works."""

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.uses)

    def steps_per_hour(self, stage: str) -> float:
        """By the sum of a step's parts, or by the longer side where rollout and training overlap."""
        seconds = self.seconds[stage]
        rollout_s = sum(seconds.get(part, 0.0) for part in ROLLOUT_PARTS)
        if self.overlaps and stage == "para_grpo":
            return 3600 / max(rollout_s, sum(seconds.values()) - rollout_s)
        return 3600 / sum(seconds.values())


def make_plan(
    params: Params,
    layout: Layout,
    architecture: Architecture = QWEN3_VL_8B,
    assumptions: Assumptions | None = None,
) -> Plan:
    """The plan of `params` on `layout`. Raises ValueError if they ask for more GPUs than there are."""
    assumptions = assumptions or Assumptions()
    sft, rl = params.train.processes, params.train.rl_processes or params.train.processes
    engine = params.engine
    serving = engine.servers * engine.tensor_parallel if isinstance(engine, VLLMEngineConfig) else 0
    first = engine.first_gpu if serving else None
    apart = serving and first is not None and first >= rl
    needed = max(sft, rl, first + serving if apart else 0)
    if needed > layout.gpus:
        raise ValueError(f"these parameters use {needed} GPUs, but {layout.name} has {layout.gpus}")
    uses = [
        trainer(params, layout, architecture, sft, params.sft.micro_batch_tokens, False),
        trainer(params, layout, architecture, rl, params.grpo.micro_batch_tokens, True),
    ]
    if serving:
        server = _server(params, layout, architecture)
        if not apart:  # the server shares a GPU with the trainer
            held = layout.gpu_gib * engine.gpu_memory_share
            both = uses[1].gib | {"server": held}
            uses[1] = Use("RL, trainer and server on one GPU", both, layout.gpu_gib, uses[1].notes)
        uses.append(server)
    return Plan(
        layout,
        tuple(uses),
        {frames: frames * _frame_tokens(params, architecture) for frames in sorted(params.budget.choices)},
        {
            "sft": _sft_seconds(params, architecture, sft, assumptions),
            "para_grpo": _rl_seconds(params, architecture, rl, max(1, serving), assumptions),
        },
        _disk(params, architecture),
        assumptions,
        overlaps=params.grpo.staleness > 0,
    )


def trainer(
    params: Params, layout: Layout, sizes: Architecture, processes: int, tokens: int, rl: bool
) -> Use:
    """A GPU that trains, with micro-batches of `tokens`."""
    train = params.train
    narrow = 2 if train.dtype == "bfloat16" else 4
    parts = processes if train.sharding == "fsdp2" else 1
    trained = sizes.adapter_parameters(train.lora.rank) if train.lora else sizes.text_parameters
    frozen = sizes.vision_parameters + (sizes.text_parameters if train.lora else 0)
    freeze = params.grpo.freeze_vision if rl else params.sft.freeze_vision
    if not freeze and not train.lora:
        trained, frozen = trained + sizes.vision_parameters, 0
    outer = 2 * sizes.embedding_parameters + sizes.vision_parameters
    bytes_ = {
        "weights": (4 * trained + narrow * frozen) / parts,
        "gradients": 4 * trained / parts * (2 if processes > 1 and parts == 1 else 1),
        "optimiser": 8 * trained / parts,
    }
    if parts > 1:
        gathered = narrow * (outer + 2 * sizes.layer_parameters)
        bytes_["gathered"] = gathered + 4 * (2 * sizes.embedding_parameters + sizes.layer_parameters)
    if rl and params.grpo.kl != "none" and not train.lora:
        bytes_["reference"] = narrow * sizes.parameters / parts + (narrow * outer if parts > 1 else 0)
    inside = 10 * sizes.hidden + 2 * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size
    inside = narrow * tokens * (inside + 4 * sizes.intermediate)
    kept = narrow * tokens * sizes.hidden
    if train.gradient_checkpointing:
        bytes_["activations"] = sizes.layers * kept + inside
    else:
        bytes_["activations"] = sizes.layers * inside
    rows = min(tokens, LOGITS_AT_ONCE // sizes.vocabulary)
    bytes_["logits"] = rows * sizes.vocabulary * (narrow + 3 * 4)
    frames = tokens // _frame_tokens(params, sizes)
    patches = frames * sizes.tokens_per_frame(params.visual.max_pixels) * sizes.merge**2
    tower = 8 * sizes.vision_hidden + 2 * sizes.vision_intermediate
    pixels = 4 * 3 * sizes.temporal * sizes.patch**2
    outputs = narrow * (1 + len(sizes.taps)) * sizes.hidden / sizes.merge**2
    bytes_["visual"] = patches * (pixels + narrow * tower * (1 if freeze else sizes.vision_depth) + outputs)
    gib = {name: value / GIB for name, value in bytes_.items()}
    gib["reserve"] = 3.0
    name = "RL, trainer" if rl else "SFT"
    how = "weights split" if parts > 1 else "adapters" if train.lora else "weights whole"
    notes = (f"{processes} processes, {how}, micro-batches of {tokens} tokens, at most {frames} frames",)
    return Use(name, gib, layout.gpu_gib, notes)


def _server(params: Params, layout: Layout, sizes: Architecture) -> Use:
    engine = params.engine
    narrow = 2 if engine.dtype == "bfloat16" else 4
    held = layout.gpu_gib * engine.gpu_memory_share
    weights = narrow * sizes.parameters / engine.tensor_parallel / GIB
    overhead = 4.0  # passes of the profile run, CUDA graphs
    cache = max(0.0, held - weights - overhead)
    tokens = int(cache * GIB * engine.tensor_parallel / (sizes.kv_bytes_per_token * narrow / 2))
    longest = longest_episode(params, sizes)
    fitting = f"{tokens // longest} episodes of the longest kind ({longest:,} tokens)"
    notes = (f"the cache holds {tokens:,} tokens: {fitting}",)
    return Use(
        "RL, server", {"weights": weights, "KV cache": cache, "overhead": overhead}, layout.gpu_gib, notes
    )


def longest_episode(params: Params, sizes: Architecture = QWEN3_VL_8B) -> int:
    """Tokens of an episode that uses all it may: frames, turns, calls with reports of full length."""
    episode = params.episode
    prompt = max(params.budget.choices) * _frame_tokens(params, sizes) + Assumptions.text_tokens
    results = episode.max_calls * (episode.subagent.max_new_tokens + 40)
    return prompt + (episode.max_turns + 1) * episode.max_new_tokens + episode.max_turns * results


def _frame_tokens(params: Params, sizes: Architecture) -> int:
    borders = MARK_TOKENS if params.visual.time_marks else 2
    return sizes.tokens_per_frame(params.visual.max_pixels) + borders


def _pass_s(sizes: Architecture, tokens: float, per_weight: int, gpus: int, guess: Assumptions) -> float:
    """Seconds of passes that cost `per_weight` operations a weight and token."""
    return per_weight * sizes.text_parameters * tokens / (gpus * guess.tflops * 1e12 * guess.utilisation)


def _training_cost(params: Params) -> int:
    """Operations a weight and token: forward 2, backward 4 (2 where it is frozen), forward again 2."""
    return 2 + (2 if params.train.lora else 4) + 2 * params.train.gradient_checkpointing


def _sft_seconds(params: Params, sizes: Architecture, gpus: int, guess: Assumptions) -> dict[str, float]:
    tokens = params.sft.batch_size * guess.sft_sample_tokens
    trained = _pass_s(sizes, tokens, _training_cost(params), gpus, guess)
    return {
        "train": trained,
        # read while the step before is trained on; what is left of it is waited for
        "video": max(0.0, guess.video_s * params.sft.batch_size / gpus / guess.readers - trained),
    }


def _rl_seconds(
    params: Params, sizes: Architecture, gpus: int, servers: int, guess: Assumptions
) -> dict[str, float]:
    config = params.grpo
    episodes = config.prompts_per_step * config.group_size
    choices = params.budget.choices if params.budget.gating else [max(params.budget.choices)]
    prompt = sum(choices) / len(choices) * _frame_tokens(params, sizes) + guess.text_tokens
    crop = params.visual.crop_max_frames * _frame_tokens(params, sizes)
    tokens = episodes * (prompt + guess.written_tokens + guess.calls * 150)
    read = config.prompts_per_step * prompt + episodes * guess.calls * (crop + prompt)
    written = episodes * (guess.written_tokens + guess.calls * 150)
    cost = _training_cost(params) + (2 if config.kl != "none" else 0)
    videos = config.prompts_per_step * (1 + config.group_size * guess.calls / 2)
    return {
        "video": guess.video_s * videos / guess.readers,
        "read": _pass_s(sizes, read, 2, servers, guess),
        "write": written / (guess.decode_tokens_per_s * servers),
        "train": _pass_s(sizes, tokens, cost, gpus, guess),
        "sync": _sync_seconds(params, sizes, guess),
    }


def _sync_seconds(params: Params, sizes: Architecture, guess: Assumptions) -> float:
    """New weights, in 16 bits: written to the disk and read there, or copied to this host, to the
    server's, and to its GPU.
    """
    gigabytes = 2 * sizes.parameters / 1e9
    if _over_the_disk(params):
        return 2 * gigabytes / guess.disk_gb_per_s
    return 3 * gigabytes / guess.copy_gb_per_s


def _over_the_disk(params: Params) -> bool:
    return params.engine.name != "vllm" or params.engine.weight_transfer == "disk"


def _disk(params: Params, sizes: Architecture) -> dict[str, float]:
    """GiB of what training writes: models in 16 bits, checkpoints with optimiser."""
    model = 2 * sizes.parameters / GIB
    if params.train.lora:
        checkpoint = 12 * sizes.adapter_parameters(params.train.lora.rank) / GIB
    else:
        checkpoint = (12 * sizes.text_parameters + 2 * sizes.vision_parameters) / GIB
    kept = max(2, params.grpo.keep_checkpoints) + 1  # one more while it is written
    # base, SFT, RL, and the folders that the server reads; DVC links outputs into its cache
    handed_over = 1 + params.grpo.staleness if _over_the_disk(params) else 0
    return {"models": (3 + handed_over) * model, "checkpoints": kept * checkpoint}


def describe(plan: Plan) -> str:
    """The plan for a person."""
    lines = [f"{plan.layout.name}: {plan.layout.gpus} GPUs of {plan.layout.gpu_gib:g} GiB", ""]
    for use in plan.uses:
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in use.gib.items())
        state = "fits" if use.fits else "DOES NOT FIT"
        lines += [f"{use.what}: {use.total_gib:.1f} of {use.has_gib:g} GiB, {state}", f"    {parts}"]
        lines += [f"    {note}" for note in use.notes]
    shown = ", ".join(f"{tokens:,} for {frames} frames" for frames, tokens in plan.visual_tokens.items())
    lines += ["", f"visual tokens of a prompt: {shown}"]
    for stage, seconds in plan.seconds.items():
        parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        way = "; rollouts ahead of the trainer" if plan.overlaps and stage == "para_grpo" else ""
        lines.append(f"{stage}: about {plan.steps_per_hour(stage):.0f} steps an hour ({parts}{way})")
    disk = ", ".join(f"{name} {gib:.0f} GiB" for name, gib in plan.disk_gib.items())
    lines += [f"disk of training, without media: {disk}", "", "estimates, not measured; they assume:"]
    lines += [f"    {name} {value:g}" for name, value in asdict(plan.assumptions).items()]
    return "\n".join(lines)


def to_json(plan: Plan) -> dict:
    """The plan for other programs."""
    uses = [asdict(use) | {"total_gib": use.total_gib, "fits": use.fits} for use in plan.uses]
    rates = {stage: plan.steps_per_hour(stage) for stage in plan.seconds}
    return asdict(plan) | {"uses": uses, "steps_per_hour": rates, "fits": plan.fits}
