"""The card of a model folder: what it was made from, how, under which licences, and whom to cite.

It follows from parameters that the stage depends on and from data/prepared/report.json, and holds no times
and no run ids, so the same training writes the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any, Literal

from paravt.config import Params

Stage = Literal["sft", "para_grpo"]
Source = Mapping[str, Any]  # of published rows: fields of data.hub, as validate keeps them

ABOUT = """\
A Qwen3-VL that answers questions about a video. It sees a few frames, calls `crop_video` on any number of
time windows in one turn, reads the reports of sub-agents with the same weights, and answers."""

CITATION = """\
```bibtex
@misc{paravt,
  title = {ParaVT},
  year = {2026},
  eprint = {2605.20342},
  archivePrefix = {arXiv}
}
```

The base model is to be cited as its own card asks."""


def read_source(report: Path) -> Source | None:
    """The source of the rows that are trained on, from their report.json; None if they are the needles'."""
    if not report.is_file():
        return None
    return json.loads(report.read_text(encoding="utf-8")).get("published", {}).get("source")


def write_card(folder: Path, params: Params, stage: Stage, source: Source | None = None) -> None:
    """README.md of a model folder."""
    (folder / "README.md").write_text(model_card(params, stage, source), encoding="utf-8")


def model_card(params: Params, stage: Stage, source: Source | None = None) -> str:
    """Markdown with the metadata block of the hub. `source` says where published rows are from."""
    published = source["model"]["repository"] if source and source["model"] else None
    meta = {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "video-text-to-text",
        "tags": "[qwen3-vl, video, tool-calling, paravt]",
    } | ({"base_model": published} if published else {})
    name = (published or params.base_model).rpartition("/")[2]
    method = "SFT" if stage == "sft" else f"SFT and GRPO ({params.method})"
    sections = {
        "Data": _data(params, stage, source),
        "Method": _method(params, stage, source),
        "Use": _use(params),
        "Licence": _licence(source),
        "Citation": CITATION,
    }
    head = "\n".join(f"{key}: {value}" for key, value in meta.items())
    parts = [f"---\n{head}\n---", f"# {name} after {method}", ABOUT]
    return "\n\n".join([*parts, *(f"## {title}\n\n{text}" for title, text in sections.items())]) + "\n"


def _data(params: Params, stage: Stage, source: Source | None) -> str:
    if source is None:
        needles = params.data.needles
        size = f"{needles.size} x {needles.size} pixels"
        counts = f"{needles.sft_count} samples for SFT"
        counts += f" and {needles.rl_count} questions for RL" if stage == "para_grpo" else ""
        return f"The needle world of this project, from seed {params.data.seed}: {counts}, {size}."
    reports = "their own words" if source["reports"] == "row" else "reports of the base model"
    return "\n".join(
        [
            f"- rows: {_remote(source['training'])}",
            f"- SFT splits: {', '.join(source['sft_splits'])}; returned frames are replaced by {reports}",
            f"- media: {_remote(source['media'])}",
        ]
    )


def _remote(repository: Mapping[str, str]) -> str:
    return f"`{repository['repository']}` at `{repository['revision']}`"


def _method(params: Params, stage: Stage, source: Source | None) -> str:
    lora = params.train.lora
    how = f"adapters of rank {lora.rank}, merged" if lora else "all weights of the language model"
    frozen = lora or (params.sft.freeze_vision and (stage == "sft" or params.grpo.freeze_vision))
    lines = [
        f"- trained: {how}{'; the vision tower is frozen' if frozen else ', and the vision tower'}",
        f"- SFT: {_sft(params, source)}",
    ]
    if stage == "para_grpo":
        grpo = params.grpo
        size = f"{grpo.prompts_per_step} prompts with {grpo.group_size} episodes each"
        gate = f"drawn from {params.budget.choices}" if params.budget.gating else "always the largest"
        anchor, kl = params.anchoring, f"KL {grpo.kl}, weight {grpo.kl_weight:g}"
        lines += [
            f"- GRPO: {grpo.steps} steps of {size}, rate {grpo.optimiser.learning_rate:g}",
            f"- frame budget {gate}; anchoring {anchor.scope}, weight {anchor.weight:g}; {kl}",
        ]
    return "\n".join([*lines, f"- seed {params.seed}"])


def _sft(params: Params, source: Source | None) -> str:
    sft = params.sft
    if sft.source == "hub" and source:
        return f"the published checkpoint {_remote(source['sft_model'])}, as it is"
    return f"{sft.steps} steps of {sft.batch_size} samples, rate {sft.optimiser.learning_rate:g}"


def _use(params: Params) -> str:
    visual = params.visual
    marks = "each after its time as `<12.3 seconds>`" if visual.time_marks else "without their times"
    return "\n".join(
        [
            f"- frames are images of {visual.min_pixels:,} to {visual.max_pixels:,} pixels, {marks}",
            f"- a crop has at most {visual.crop_max_frames} frames, {visual.crop_fps:g} a second",
            "- `paravt ask VIDEO QUESTION --model FOLDER` does all of it",
            "- transformers and vLLM load the folder as any Qwen3-VL",
        ]
    )


def _licence(source: Source | None) -> str:
    text = "The weights are under Apache-2.0, as those of the base model."
    if source:
        text += (
            f" The data was used under the licences {', '.join(source['licences'])}; their cards say more."
        )
    return text
