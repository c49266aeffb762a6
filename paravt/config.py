"""The one configuration of the project: a pydantic model per group of params.yaml.

Strict, frozen, extra fields forbidden. The text under a field is its help. Objects are passed down; nothing
below reads a file or an environment variable to decide what to compute.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

UPSTREAM = "upstream:"
UpstreamMode = Annotated[str, StringConstraints(pattern=rf"^{UPSTREAM}[a-z0-9-]+$")]
Mode = Literal["direct", "reasoning", "agentic", "agentic_minimal"] | UpstreamMode


FOOTAGE = "data/footage"


class Group(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class VisualConfig(Group):
    """How frames become tokens: the same in SFT, RL, evaluation and `paravt ask`."""

    min_pixels: int = Field(784, gt=0)
    """Smaller frames are enlarged to this many pixels."""
    max_pixels: int = Field(50_176, gt=0)
    """Larger frames are shrunk to this many pixels (50,176 = 224 x 224 = 49 tokens)."""
    time_marks: bool = True
    """Each frame is preceded by its time, as `<12.3 seconds>`."""
    crop_fps: float = Field(1.0, gt=0)
    """Frames per second of a crop."""
    crop_max_frames: int = Field(16, gt=0)
    """Most frames of a crop; longer windows are spread evenly."""
    read_timeout_s: float = Field(60.0, gt=0)
    """A video reader that has not answered by then is ended and reported."""


class BudgetConfig(Group):
    """Ratio-gated overview frames."""

    choices: list[int] = [4, 8, 16, 32, 64]
    """Frame budgets K; one is drawn per (seed, epoch, sample) and shared by the group."""
    gating: bool = True
    """False: K is always the largest choice."""

    @model_validator(mode="after")
    def _check(self) -> BudgetConfig:
        if not self.choices or min(self.choices) < 1 or len(set(self.choices)) != len(self.choices):
            raise ValueError("budget.choices must be distinct positive frame counts, for example [4, 8, 16]")
        return self


class SubagentConfig(Group):
    """The weight-sharing agent that looks at one crop."""

    max_new_tokens: int = Field(512, gt=0)
    """A report is cut there, and says so."""
    sees_question: bool = False
    """False: a general instruction only, so that a report does not depend on the question."""


class EpisodeConfig(Group):
    """One episode: dispatch, gather, answer."""

    mode: Mode = "agentic"
    """System prompt; the agentic ones offer crop_video. upstream:NAME: the words of a published baseline."""
    dispatch: Literal["parallel", "sequential", "frames"] = "parallel"
    """parallel: all calls of a turn at once, text reports; sequential: one call a turn, text report;
    frames: crop frames go back into the main context as images."""
    force_think: bool = True
    """`<think>` is put before each assistant turn of the main agent."""
    max_turns: int = Field(3, ge=0)
    """Tool turns; after them the answer is asked for."""
    max_calls: int = Field(5, gt=0)
    """Calls of one turn that run; later ones get an answer that says so."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature of main agent and sub-agents; 0 is greedy."""
    max_new_tokens: int = Field(2048, gt=0)
    """Tokens of one main turn."""
    subagent: SubagentConfig = SubagentConfig()

    @property
    def calls_per_turn(self) -> int:
        """Calls of one turn that run, and that the prompt allows: one if they are sequential."""
        return 1 if self.dispatch == "sequential" else self.max_calls


class RewardConfig(Group):
    """Total = accuracy + format_weight x format + tool."""

    tool: Literal["gated", "published", "off"] = "gated"
    """gated: tool_weight x accuracy if a call ran; published: the 0.1 / 0.3 / +0.5 ladder; off: none."""
    tool_weight: float = 0.8
    format: Literal["sites", "published_para", "published_suffix", "published_vanilla", "off"] = "sites"
    """sites: half for right thinks, half for right acts; published_*: the released string rules."""
    format_weight: float = 1.0
    open_ended: Literal["f1", "exact", "judge"] = "f1"
    """How open answers are scored; judge verdicts are handed in, and a missing one makes accuracy None."""
    judge_model: str | None = None
    """Name of the model that judges, at the endpoint PARAVT_JUDGE_URL; for `open_ended: judge`."""


class AnchoringConfig(Group):
    """The parseability anchor."""

    scope: Literal["site", "structural", "sequence", "off"] = "site"
    """site: each structural site's centred outcome on its own tag tokens; structural: one normalised format
    score on all tag tokens; sequence: the scalar bonus of the release, in the total; off: none."""
    weight: float = Field(0.5, ge=0)
    """Lambda."""


class OptimiserConfig(Group):
    learning_rate: float = Field(gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_share: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = Field(1.0, gt=0)


class SFTConfig(Group):
    """Cold start on traces."""

    source: Literal["traces", "hub"] = "traces"
    """traces: trained here; hub: data.hub.sft_model is taken as it is, and nothing is trained."""
    steps: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Samples per step, over all processes."""
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Padded tokens of one forward pass."""
    freeze_vision: bool = True
    """True: the vision tower and its mergers keep their weights."""
    packing: bool = False
    """True: samples share rows of micro_batch_tokens, and none sees another; longer ones are left out."""
    save_every: int = Field(100, gt=0)
    optimiser: OptimiserConfig


class GRPOConfig(Group):
    """PARA-GRPO post-training."""

    steps: int = Field(gt=0)
    prompts_per_step: int = Field(gt=0)
    group_size: int = Field(8, ge=1)
    spread: Literal["sample", "population", "leave_one_out", "none"] = "sample"
    """What the centred reward is divided by (leave_one_out: baseline of the others, no division)."""
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    """Bounds of the PPO ratio around 1. One update is made per batch, so the ratio is 1 and they are idle."""
    kl: Literal["loss", "reward", "none"] = "loss"
    """loss: k3 to the frozen start in the loss; reward: k1 in the reward, as released; none."""
    kl_weight: float = Field(0.01, ge=0)
    normaliser: Literal["token", "sequence", "constant"] = "token"
    importance: Literal["token", "geometric", "off"] = "token"
    """Truncated correction between engine and trainer."""
    importance_cap: float = Field(5.0, gt=0)
    importance_action: Literal["mask", "clamp"] = "mask"
    """mask: tokens above the cap get weight 0, as released; clamp: the cap."""
    entropy_weight: float = Field(0.0, ge=0)
    mask_truncated: bool = False
    """True: rollouts that ended at the token limit are left out of the loss."""
    refill_limit: int = Field(0, ge=0)
    """Rounds in which groups that teach nothing are replaced by groups of other prompts; 0: none."""
    staleness: int = Field(0, ge=0, le=8)
    """Steps that the weights of a rollout may be behind. 0: rollout and training take turns; more: the next
    steps are rolled out while the trainer works, by an engine with weights of its own."""
    train_subagents: bool = False
    """True: sub-agent tokens carry the main advantage, in the same denominator."""
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Padded tokens of one forward pass."""
    freeze_vision: bool = True
    """True: the vision tower and its mergers keep their weights."""
    save_every: int = Field(5, gt=0)
    keep_checkpoints: int = Field(2, ge=1)
    optimiser: OptimiserConfig


class LoRAConfig(Group):
    """Adapters of low rank on the linear layers of the language model; the weights below them are kept."""

    rank: int = Field(64, gt=0)
    alpha: float = Field(128.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""


class TrainConfig(Group):
    """How SFT and RL are laid out on a machine. Processes, sharding and checkpointing change no result."""

    processes: int = Field(1, ge=1)
    """Processes of this machine, one per GPU; more than one are started by accelerate."""
    rl_processes: int | None = Field(None, ge=1)
    """Those of RL, where the engine has GPUs of its own; null: as many as in SFT."""
    sharding: Literal["none", "fsdp2"] = "none"
    """none: each process holds the whole model; fsdp2: weights, gradients and optimiser are split."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward passes and of frozen weights. Trained weights are held in float32, and
    log-probs come from float32 logits, either way."""
    gradient_checkpointing: bool = False
    """True: activations of a layer are computed again in the backward pass; less memory, more time."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """flash_attention_2 needs the package flash-attn and a GPU."""
    lora: LoRAConfig | None = None
    """null: the weights themselves are trained."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.lora and self.sharding != "none":
            raise ValueError("train.lora trains few weights and needs no sharding; write train.sharding none")
        return self

    def identity(self) -> dict:
        """What a result depends on: not the processes, nor how the weights lie in them."""
        return self.model_dump(include={"dtype", "lora"})


class EvaluateConfig(Group):
    """Greedy accuracy per frame budget, and format compliance when sampling."""

    budgets: list[int] = [4, 8, 16]
    questions_per_budget: int = Field(gt=0)
    format_temperatures: list[float] = [0.7, 1.0]
    format_questions: int = Field(gt=0)
    """Episodes sampled per temperature."""
    max_error_share: float = Field(0.02, ge=0, le=1)
    """Above it, the command ends non-zero."""
    benchmarks: list[str] = []
    """Published splits that are asked greedily beside the needle split."""
    benchmark_budget: int = Field(64, gt=0)
    """Overview frames for them."""
    benchmark_questions: int | None = Field(None, gt=0)
    """Questions of each, drawn by their ids; null: all."""
    benchmark_mode: Mode | None = None
    """Prompt mode of them; null: episode.mode. upstream:NAME: asked in the words of that baseline, with its
    rounds, calls and results; NAME is one of data.hub.prompts."""


class NeedlesConfig(Group):
    """The needle world: videos with known answers."""

    sft_count: int = Field(gt=0)
    rl_count: int = Field(gt=0)
    eval_count: int = Field(gt=0)
    """Questions of each table; a video carries several."""
    questions_per_video: int = Field(4, gt=0)
    parts: int = Field(3, ge=2)
    part_s: tuple[float, float] = (6.0, 9.0)
    """Shortest and longest part."""
    needle_s: tuple[float, float] = (2.0, 3.0)
    """How long the shape shows."""
    size: int = Field(32, gt=0)
    """Width and height in pixels."""
    fps: int = Field(10, gt=0)
    tool_share: float = Field(0.5, ge=0, le=1)
    """Share of SFT traces that call the tool; the others answer from the overview."""
    source_dir: str = FOOTAGE
    """Folder of videos into whose frames RL and evaluation questions are written; they then name parts by
    time. While data/footage, the default, holds no video, parts are rendered as colours."""


class RepositoryConfig(Group):
    """A repository of the hub at a revision."""

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """owner/name"""
    revision: str = Field("main", min_length=1)
    """A commit or a branch; the manifest records the commit that it was."""


class HubConfig(Group):
    """Published data from the hub. HF_ENDPOINT, HF_TOKEN: where, as whom; PARAVT_MEDIA_ROOT: whereto."""

    training: RepositoryConfig
    """Tables of SFT and RL rows."""
    media: RepositoryConfig
    """Archives with the videos and images that those rows name."""
    model: RepositoryConfig | None = None
    """The base model, in place of base_model; its weights stay in the media root."""
    sft_model: RepositoryConfig | None = None
    """A checkpoint after SFT, for `sft.source: hub`."""
    models: list[RepositoryConfig] = []
    """More models to have at hand, as data/hub/OWNER__NAME."""
    benchmarks: list[Literal["videomme", "longvideobench", "lvbench", "mlvu", "mmvu", "charades"]] = []
    """Benchmarks whose tables and media are brought."""
    prompts: list[str] = []
    """Published baselines whose prompts are brought, for `evaluate.benchmark_mode: upstream:NAME`."""
    revisions: dict[str, str] = {}
    """Revisions of benchmarks by name, in place of those of paravt/data/published.py."""
    sft_splits: list[str] = Field(min_length=1)
    """Splits of the SFT tables: charades, geminicot, longvideoreason, museg, selftrace, tvg, videor1."""
    buckets: list[str] | None = None
    """Sentinel buckets whose media are brought, as longvt_source/selftrace or selfqa; none: all."""
    sft_rows: int | None = Field(None, gt=0)
    """First rows of each SFT split; none: all."""
    rl_rows: int | None = Field(None, gt=0)
    """First rows of the RL table; none: all."""
    benchmark_rows: int | None = Field(None, gt=0)
    """First rows of each benchmark table whose media are brought; none: all."""
    licences: list[str] = ["apache-2.0", "mit"]
    """Licences that the user accepts, as cards name them; `unknown`: cards that name none."""
    workers: int = Field(4, ge=1)
    """Files that are moved or opened at the same time."""
    keep_free_gib: float = Field(5.0, ge=0)
    """Disk space that is left free."""
    merge_calls: bool = True
    """True: independent calls of successive turns become one turn."""
    reports: Literal["row", "model"] = "row"
    """What takes the place of returned frames in SFT rows. row: the row's own words; model: what the base
    model wrote (`python -m stages.reports`)."""
    drop_overlap: bool = True
    """True: training rows whose video is in a chosen benchmark are set aside, whatever its name is there."""
    opened_videos: int | None = Field(None, gt=0)
    """Videos that are opened and decoded before training; of the others the container's word is taken.
    none: all."""
    max_set_aside: float = Field(0.2, ge=0, le=1)
    """Above this share of rows set aside, validation fails."""


class DataConfig(Group):
    seed: int = 1
    """Draws the needle world; apart from the training seed, so that all seeds answer the same questions."""
    needles: NeedlesConfig
    hub: HubConfig | None = None
    """Published training rows in place of the needles'; the needles' evaluation questions stay."""


class TransformersEngineConfig(Group):
    """Generation in the training process, by transformers."""

    name: Literal["transformers"] = "transformers"
    max_batch_tokens: int = Field(65_536, gt=0)
    """Samples x padded prompt tokens of one batch; it bounds the key and value cache."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto: float32 on the CPU, bfloat16 on a GPU. An engine that samples from
    the very weights that are trained has theirs."""

    def precision(self, device: str | None) -> Literal["float32", "bfloat16"]:
        """What `dtype` is on `device`."""
        return self.dtype if self.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"


class VLLMEngineConfig(Group):
    """Generation by vLLM servers. PARAVT_VLLM_URLS names running ones; without it they are started here."""

    name: Literal["vllm"] = "vllm"
    servers: int = Field(1, ge=1)
    """Servers to start."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one server."""
    first_gpu: int | None = Field(None, ge=0)
    """The servers take the GPUs from this one on; none: what CUDA_VISIBLE_DEVICES says, or the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations in the servers. The trainer's own makes the importance ratio 1."""
    eager: bool = True
    """False: CUDA graphs and compilation; slower to start, faster on a GPU."""
    chunked_prefill: bool = False
    """True: a long prompt is read in parts between other requests. For GPUs; vLLM 0.32 on the CPU dies of it
    when draws have seeds, as ours have."""
    gpu_memory_share: float = Field(0.85, gt=0, lt=1)
    """Share of a GPU's memory that weights and cache of a server may take."""
    cpu_cache_gib: int = Field(1, ge=1)
    """Key and value cache of a server on the CPU."""
    max_sequences: int = Field(64, ge=1)
    """Sequences that a server decodes at the same time; samples of one request at most."""
    max_in_flight: int = Field(64, ge=1)
    """Requests that wait at one server; more are held back here."""
    request_timeout_s: float = Field(600.0, gt=0)
    """A request that is not answered by then is sent again."""
    retries: int = Field(4, ge=0)
    """Times that a request is sent again after a timeout, a lost connection or an error of the server."""
    start_timeout_s: float = Field(900.0, gt=0)
    """A server that is not ready by then is ended and reported."""
    weight_transfer: Literal["disk", "gloo", "nccl"] = "disk"
    """How new weights get there: disk, servers read a folder that both sides see; gloo, over the network from
    host memory; nccl, from GPU to GPU, where each process has one of its own."""
    transfer_host: str = "127.0.0.1"
    """With gloo and nccl: this machine's address as servers reach it."""


class EndpointConfig(Group):
    """An OpenAI-compatible endpoint, for `paravt eval` only: it gives text, neither tokens nor log-probs. Its
    key comes from PARAVT_ENDPOINT_KEY."""

    url: str
    """For example http://localhost:8000/v1."""
    model: str | None = None
    """Name of the model there; not needed where one alone is served."""
    in_flight: int = Field(16, ge=1)
    """Requests at the same time."""
    timeout_s: float = Field(600.0, gt=0)
    """A request that is not answered by then is sent again."""
    retries: int = Field(4, ge=0)
    """Times that a request is sent again after a timeout, a lost connection, 429 or a server's error."""
    prefill: bool = False
    """True: the endpoint continues an assistant message that was begun (vLLM); force_think needs it."""


EngineConfig = Annotated[TransformersEngineConfig | VLLMEngineConfig, Field(discriminator="name")]


class Params(Group):
    """params.yaml, whole."""

    scale: Literal["tiny", "smoke", "paravt_mini", "paravt_8b"]
    method: str
    """Name of the arm, for reading; the values below are what is run."""
    seed: int = 1
    base_model: str = "models/tiny-base"
    """Folder of the model that training starts from."""
    data: DataConfig
    visual: VisualConfig
    budget: BudgetConfig
    episode: EpisodeConfig
    reward: RewardConfig
    anchoring: AnchoringConfig
    train: TrainConfig = TrainConfig()
    sft: SFTConfig
    grpo: GRPOConfig
    evaluate: EvaluateConfig
    engine: EngineConfig

    @model_validator(mode="after")
    def _check(self) -> Params:
        if self.sft.source == "hub" and not (self.data.hub and self.data.hub.sft_model):
            raise ValueError(
                "sft.source is hub, but data.hub.sft_model names no checkpoint; write its repository and "
                "revision, or sft.source traces"
            )
        if self.episode.mode.startswith(UPSTREAM):
            raise ValueError(
                f"episode.mode is {self.episode.mode}, but stages train and ask in our own words; write "
                "evaluate.benchmark_mode for the published splits"
            )
        if self.engine.name == "vllm" and self.engine.weight_transfer == "nccl":
            first, trainers = self.engine.first_gpu, self.train.rl_processes or self.train.processes
            if first is not None and first < trainers:
                raise ValueError(
                    f"engine.weight_transfer is nccl, but servers and trainer share GPU {first}, which NCCL "
                    "refuses; write gloo or disk, or another engine.first_gpu"
                )
        asked = self.evaluate.benchmark_mode or ""
        brought = self.data.hub.prompts if self.data.hub else []
        if asked.startswith(UPSTREAM) and asked.removeprefix(UPSTREAM) not in brought:
            raise ValueError(
                f"evaluate.benchmark_mode is {asked}, whose prompt is not brought; add "
                f"{asked.removeprefix(UPSTREAM)} to data.hub.prompts"
            )
        if self.reward.open_ended == "judge" and not self.reward.judge_model:
            raise ValueError(
                "reward.open_ended is judge, but reward.judge_model names no model; name it, or write f1"
            )
        return self
