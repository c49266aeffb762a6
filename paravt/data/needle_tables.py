"""The needle world on disk: videos, SFT traces, RL and evaluation questions.

    FOLDER/videos/*.mp4     the rendered clips of all splits; no clip is shared between splits
    FOLDER/sft.jsonl        traces, one row an agent: main (with its tool results) and sub-agent
    FOLDER/rl.jsonl         questions, one Sample a line
    FOLDER/eval.jsonl       questions, one Sample a line
    FOLDER/sources.json     with real videos: which are used for what, and why the others are not

Traces are worked out from the frames that the video reader returns, at the frame budget that SFT draws for
the row, so what a trace names is what training shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import json
from pathlib import Path

from paravt.config import NeedlesConfig, VisualConfig
from paravt.data.needles import Scene, make_split, stable_rng
from paravt.data.sources import Sources
from paravt.data.traces import Look, main_trace, report_text
from paravt.rollout import Sample, write_jsonl
from paravt.video import Frames, Video, open_video

SPLITS = ("sft", "rl", "eval")


def write_tables(
    folder: Path,
    prefix: str,
    config: NeedlesConfig,
    visual: VisualConfig,
    budgets: Sequence[int],
    seed: int,
    sources: Sources | None = None,
) -> dict[str, int]:
    """Render all splits into `folder` and write the three tables; returns the row count of each.

    `prefix` is put before `videos/NAME.mp4` in the tables: the folder as seen from the repository root.
    With `sources` RL and evaluation are written into real videos. SFT stays on coloured parts: what its
    traces note of each frame is a colour.
    """
    videos = folder / "videos"
    videos.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in SPLITS:
        wanted = getattr(config, f"{split}_count")
        footage = None if split == "sft" else sources
        samples, scenes = make_split(
            config, seed, split, wanted, videos, f"{prefix}/videos/", footage, visual.read_timeout_s
        )
        if split != "sft":
            write_jsonl(folder / f"{split}.jsonl", samples)
            counts[split] = len(samples)
            continue
        rows = list(_trace_rows(samples, scenes, videos, config, visual, budgets, seed))
        with open(folder / "sft.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        counts[split] = len(rows)
    if sources:
        text = json.dumps(sources.to_json(), indent=2, ensure_ascii=False)
        (folder / "sources.json").write_text(text + "\n", encoding="utf-8")
    return counts


def _trace_rows(
    samples: Sequence[Sample],
    scenes: dict[str, Scene],
    videos: Path,
    config: NeedlesConfig,
    visual: VisualConfig,
    budgets: Sequence[int],
    seed: int,
) -> Iterator[dict]:
    for sample in samples:
        rng = stable_rng(seed, "trace", sample.id)
        budget = int(budgets[rng.integers(len(budgets))])
        use_tool = bool(rng.random() < config.tool_share)
        with open_video(videos / Path(sample.video).name, timeout_s=visual.read_timeout_s) as video:
            yield from _sample_rows(sample, scenes[sample.video], video, budget, use_tool, visual)


def _sample_rows(
    sample: Sample, scene: Scene, video: Video, budget: int, use_tool: bool, visual: VisualConfig
) -> Iterator[dict]:
    overview_s = video.sample(budget).times_s
    looks = main_trace(scene, sample, overview_s, use_tool).looks
    crops = _crops(video, looks, visual)
    trace = main_trace(scene, sample, overview_s, use_tool, [crop.times_s for crop in crops])
    reports = [report_text(scene, crop.times_s) for crop in crops]
    turns: list[dict] = [{"role": "assistant", "text": trace.turns[0]}]
    if use_tool:
        turns += [{"role": "tool", "results": reports}, {"role": "assistant", "text": trace.turns[1]}]
    row = {"sample": sample.to_json(), "frame_budget": budget}
    yield {"id": sample.id, "kind": "main", **row, "turns": turns}
    for number, (look, report) in enumerate(zip(looks, reports, strict=True)):
        yield {
            "id": f"{sample.id}-crop{number}",
            "kind": "subagent",
            **row,
            "window_s": [look.start_s, look.end_s],
            "turns": [{"role": "assistant", "text": report}],
        }


def _crops(video: Video, looks: Sequence[Look], visual: VisualConfig) -> list[Frames]:
    """Crops as an agent gets them: windows in tenths of a second, as they are written in the call."""
    windows = [(round(look.start_s, 1), min(round(look.end_s, 1), video.duration_s)) for look in looks]
    return video.crops(windows, visual.crop_fps, visual.crop_max_frames) if windows else []
