"""Have a model write the reports that published SFT rows lack.

Published traces return frames where ours return words. This reads data/hub and params.yaml, and for each
window that a row looks at without words asks the model in FOLDER as a sub-agent is asked: the same frames,
the same instruction, greedily. Writes data/reports/reports.jsonl, a line a window, as they come; a run that
was stopped goes on from there. Each line names its model and what that was asked, so those of another model,
other frames or another instruction are asked for again. With data.hub.reports: model the stage validate takes
its reports from this file, and depends on its folder: no stage writes it, since most runs need none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
import json
from pathlib import Path
import sys
from typing import TYPE_CHECKING

from paravt.config import Params
from paravt.data.conversion import wanted_reports
from paravt.data.schema import VideoFacts
from paravt.data.tables import read_table, sft_tables
from paravt.rollout import Sample
from stages import params as parameters
from stages.command import command
from stages.prepare import WRITTEN_REPORTS, Source, Window, asked_of, open_source, read_reports
from stages.published import FOLDER

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.engines.base import Engine, Request

BATCH = 32


@dataclass
class Counts:
    """Windows that got a report, those about which nothing was said, and those whose frames could not be
    read, with the first reason; and the lines of the file that are torn.
    """

    written: int = 0
    empty: int = 0
    torn: int = 0
    unread: int = 0
    first: str = ""


def windows_of(source: Source) -> list[Window]:
    """Each window that rows look at and that came back without words, once."""

    def facts_of(path: str) -> VideoFacts:
        return source.facts.get(source.video_of(path), VideoFacts(problem="missing"))

    found: dict[Window, None] = {}
    for table in sft_tables(source.files, source.config.sft_splits):
        for _, row in read_table(table, source.config.sft_rows):
            found.update(dict.fromkeys(wanted_reports(row, source.resolver.find, source.video_of, facts_of)))
    return list(found)


def write_reports(
    windows: Sequence[Window], engine: Engine, encoder: ChatEncoder, params: Params, model: str, target: Path
) -> Counts:
    """Ask about the windows that `target` has not from this model, a batch at a time, and add them to it.

    `model` is `folder_hash` of the model.
    """
    counts, key, known = Counts(), {"model": model, "asked": asked_of(params)}, {}
    if target.is_file():
        found, counts.torn = read_reports(target)
        known = found.get((model, key["asked"]), {})
        _end_line(target)
    left = [window for window in windows if window not in known]
    target.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(left), BATCH):
        asked = list(_requests(left[start : start + BATCH], encoder, params, counts))
        if not asked:
            continue
        answers = engine.generate([request for _, request in asked])
        with open(target, "a", encoding="utf-8") as file:
            for (window, _), [generation] in zip(asked, answers, strict=True):
                report = encoder.decode(generation.ids).strip()
                if not report:
                    counts.empty += 1
                    continue
                place = dict(zip(("video", "start_s", "end_s"), window, strict=True))
                row = key | place | {"report": report}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                counts.written += 1
        print(f"reports: {start + len(asked)} of {len(left)} windows", file=sys.stderr)
    return counts


def _end_line(path: Path) -> None:
    """A line that a kill has cut stays alone: the next one would be lost with it."""
    if not path.read_bytes().endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")


def _requests(
    windows: Sequence[Window], encoder: ChatEncoder, params: Params, counts: Counts
) -> Iterator[tuple[Window, Request]]:
    from paravt.engines.base import Request, Sampling
    from paravt.footage import locate
    from paravt.prompting import subagent_prompt
    from paravt.video import VideoError, open_video

    visual = params.visual
    sampling = Sampling(0.0, params.episode.subagent.max_new_tokens)
    for window in windows:
        video, start_s, end_s = window
        try:
            with open_video(locate(video, "."), timeout_s=visual.read_timeout_s) as opened:
                end_s = min(end_s, opened.duration_s)  # tenths of a second may round past the end
                frames = opened.crop(start_s, end_s, visual.crop_fps, visual.crop_max_frames)
        except VideoError as error:
            counts.unread += 1
            counts.first = counts.first or str(error)
            continue
        sample = Sample("report", video, "What happens?", "-", "oe")
        prompt = subagent_prompt(encoder, sample, frames, (start_s, end_s), params.episode)
        yield window, Request(tuple(prompt.ids), tuple(prompt.visuals), sampling)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.reports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/base"), help="(%(default)s)")
    parser.add_argument("--target", type=Path, default=WRITTEN_REPORTS, help="(%(default)s)")
    options = parser.parse_args(arguments)
    with command("reports"):
        params = parameters.load()
        if params.episode.subagent.sees_question:
            raise parameters.ParamsError(
                "params.yaml: reports are kept by window, so episode.subagent.sees_question must be false"
            )
        from paravt.benchmarks.runner import folder_hash
        from paravt.engines.factory import make_engine
        from paravt.engines.limits import PromptLimits
        from paravt.model import load_encoder

        windows = windows_of(open_source(params, FOLDER))
        encoder = load_encoder(options.folder, params.visual)
        limits = PromptLimits.of(params.episode, params.visual, max(params.budget.choices))
        with make_engine(params.engine, options.folder, encoder, limits) as engine:
            model = folder_hash(options.folder)
            counts = write_reports(windows, engine, encoder, params, model, options.target)
    notes = [
        f"; {counts.empty} were empty" if counts.empty else "",
        f"; {counts.unread} could not be read, first {counts.first}" if counts.unread else "",
        f"; {counts.torn} torn lines of before are not counted" if counts.torn else "",
    ]
    print(f"reports: {counts.written} written to {options.target}, of {len(windows)} windows{''.join(notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
