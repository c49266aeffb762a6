"""The state of episodes on their way: what they share, where each stands, what is known of each call.

`agent` advances these in rounds; a finished Episode becomes a Rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paravt.chat import ChatEncoder
from paravt.config import EpisodeConfig, VisualConfig
from paravt.conversation import Conversation
from paravt.footage import CropKey
from paravt.protocol.upstream import Upstream
from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, StopReason, ToolCall, ToolError
from paravt.video import Frames


@dataclass(frozen=True)
class AgentSetup:
    """What all episodes of a call share.

    `upstream` is the prompt of a published baseline, where the episode's mode names one. `budget` gives the
    overview frames K of a sample; `group_size` episodes are run for each sample;
    relative video paths start at `video_root`; `readers` files are decoded at the same time.
    """

    encoder: ChatEncoder
    episode: EpisodeConfig
    visual: VisualConfig
    budget: Callable[[Sample], int]
    seed: int
    group_size: int = 1
    video_root: str | Path = "."
    readers: int = 4
    upstream: Upstream | None = None

    @property
    def cap(self) -> int:
        """Calls of one turn that run."""
        return self.episode.calls_per_turn

    @property
    def has_tool(self) -> bool:
        if self.upstream is not None:
            return self.upstream.family.has_tool
        return self.episode.mode in ("agentic", "agentic_minimal")

    @property
    def dialect(self) -> str:
        """How replies are written."""
        return "paravt" if self.upstream is None else self.upstream.family.dialect

    @property
    def wrapped(self) -> bool:
        """Whether results go back in tags."""
        return self.upstream is None or self.upstream.family.wrapped


Status = Literal["ok", "error", "malformed", "over_cap"]


@dataclass
class Episode:
    """An episode on its way. `stop` is None while it is live; `forced` says that the answer was asked for."""

    sample: Sample
    group: int
    index: int
    path: str
    frame_budget: int
    main: Conversation
    frames_seen: int = 0
    turns: list[EpisodeTurn] = field(default_factory=list)
    subagents: list[Conversation] = field(default_factory=list)
    tool_turns: int = 0
    forced: bool = False
    stop: StopReason | None = None
    answer: str | None = None
    error: str | None = None
    versions: dict[int, None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "main": 0.0, "subagents": 0.0})

    def fail(self, error: Exception) -> None:
        self.stop, self.error = "failed", str(error)

    def rollout(self, total_s: float) -> Rollout:
        return Rollout(
            sample_id=self.sample.id,
            turns=self.turns,
            main=self.main,
            subagents=self.subagents,
            answer=self.answer,
            stop_reason=self.stop,
            frame_budget=self.frame_budget,
            frames_seen=self.frames_seen,
            weight_versions=tuple(self.versions),
            seconds=self.seconds | {"total": total_s},
            error=self.error,
        )


@dataclass
class Look:
    """One call of the present round: what is known of it so far. `crop` is set if a window is to be read."""

    episode: Episode
    number: int
    call: ToolCall | ToolError
    execution: Execution | None = None
    crop: CropKey | None = None
    note: str = ""
    frames: Frames | None = None
    seconds: float = 0.0
    result: str | tuple[str, Frames] = ""

    def settle(self, status: Status, report: str, **details) -> None:
        """Record the outcome; `report` goes back to the model unless a result with frames is set already."""
        if status == "ok":
            details["times_s"] = tuple(float(time_s) for time_s in self.frames.times_s)
            details["clamped"] = bool(self.note)
        else:
            details["error"] = report
        window_s = self.crop.window_s if self.crop else None
        self.execution = Execution(
            self.call, status, report, window_s=window_s, seconds=self.seconds, **details
        )
        self.result = self.result or report
