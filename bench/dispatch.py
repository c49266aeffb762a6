"""What one more window costs: parallel, sequential and frames on the same checkpoint, for 1 to 8 windows.

    python -m bench.dispatch [--model DIR] [--windows 8] [--questions 8] [--rounds 2] [--out docs/dispatch]

The windows are forced, so that all ways of dispatch look at the same ones: the first turn (for `sequential`,
the first N turns) is written as a teacher writes it, the rest is the model's own: each report, and the turn
that answers. The asked part's window, worked out from the overview, is one of the N; the others are spread
over the same video. Everything else is as in evaluation: greedy, 8 overview frames.

Each episode runs alone, and the ways take turns question by question, so that other work on the machine
slows all of them. Seconds are medians over questions and rounds: of the wall, and of this process's CPU,
which other work changes less. `--out` writes NAME.json, NAME.png and NAME.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
import logging
from pathlib import Path
import statistics
import tempfile
import time
from typing import Any

from paravt.agent import AgentSetup, run_episodes
from paravt.chat import ChatEncoder
from paravt.config import Params, RewardConfig
from paravt.data.needles import Scene, make_question, make_scene, stable_rng, write_video
from paravt.data.traces import Look, call_text, main_trace
from paravt.engines.base import Engine, Generation, Request
from paravt.local import open_model
from paravt.rewards import score
from paravt.rollout import Rollout, Sample
from paravt.video import open_video
from stages.params import check, compose
from stages.plots import panels

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-base"
WAYS = ("parallel", "sequential", "frames")
FRAMES = 8
COLUMNS = ("accuracy", "turns", "tokens_written", "tokens_read", "wall_s", "cpu_s")


class Forced:
    """An engine whose first main turns are given; sub-agents and later turns are the inner engine's.

    Given tokens cost no time to generate, whatever the way: what is timed is what the windows cost.
    """

    def __init__(self, inner: Engine, encoder: ChatEncoder) -> None:
        self.inner = inner
        self.encoder = encoder
        self.given: list[list[int]] = []

    @property
    def counts(self):
        return self.inner.counts

    def give(self, turns: Sequence[str]) -> None:
        """What the next episode's first turns say, after the forced think."""
        encode = self.encoder.tokenizer.encode
        self.given = [[*encode(text, add_special_tokens=False), self.encoder.end_id] for text in turns]

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        # one episode runs at a time, so a call has one main turn or none
        if not (self.given and len(requests) == 1 and self._is_main(requests[0])):
            return self.inner.generate(requests)
        ids = self.given.pop(0)
        return [[Generation(ids, [0.0] * len(ids), "stop")]]

    def _is_main(self, request: Request) -> bool:
        """A sub-agent has no system prompt."""
        return self.encoder.tokenizer.decode(list(request.ids[:16])).startswith("<|im_start|>system")


def windows(scene: Scene, sample: Sample, overview_s: Sequence[float], count: int) -> list[Look]:
    """The asked part's window among `count`; the others have its length, spread evenly over the video."""
    [asked] = main_trace(scene, sample, overview_s, use_tool=True).looks
    length = asked.end_s - asked.start_s
    free = scene.duration_s - length
    spread = [free * (i + 0.5) / (count - 1) for i in range(count - 1)]
    others = [Look("", start, start + length) for start in spread]
    return sorted([asked, *others], key=lambda look: look.start_s)


def first_turns(trace: str, looks: Sequence[Look], way: str) -> list[str]:
    """The given turns: all calls in one, or one call in each."""
    think = trace.partition("\n</think>")[0]
    calls = [call_text(look) for look in looks]
    if way != "sequential":
        return [f"{think}\n</think>\n" + "\n".join(calls)]
    return [f"{think}\n</think>\n{call}" for call in calls]


def agent(params: Params, encoder: ChatEncoder, way: str, count: int) -> AgentSetup:
    turns = count if way == "sequential" else 1
    changes = {"dispatch": way, "temperature": 0.0, "max_turns": turns, "max_calls": count}
    episode = params.episode.model_copy(update=changes)
    return AgentSetup(encoder, episode, params.visual, lambda sample: FRAMES, seed=1)


def questions(params: Params, folder: Path, count: int) -> list[tuple[Scene, Sample, list[float]]]:
    """`count` scenes on disk, a question about one part of each, and the times of their overview frames."""
    made = []
    for index in range(count):
        scene = make_scene(params.data.needles, 1, "dispatch", index)
        path = folder / f"{scene.id}.mp4"
        write_video(scene, path, params.data.needles)
        rng = stable_rng(1, "dispatch", index, "questions")
        sample = make_question(scene, str(path), "shape", index, rng)
        with open_video(path) as video:
            made.append((scene, sample, [float(t) for t in video.sample(FRAMES).times_s]))
    return made


def measure(
    params: Params, engine: Forced, asked: Sequence[tuple[Scene, Sample, list[float]]], most: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per way and number of windows: means, and medians of seconds."""
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    for round_ in range(rounds + 1):
        for scene, sample, overview_s in asked[:1] if not round_ else asked:
            trace = main_trace(scene, sample, overview_s, use_tool=True).turns[0]
            for count in range(1, most + 1):
                looks = windows(scene, sample, overview_s, count)
                for way in WAYS:
                    engine.give(first_turns(trace, looks, way))
                    setup = agent(params, engine.encoder, way, count)
                    wall, cpu = time.perf_counter(), time.process_time()
                    [rollout] = run_episodes(engine, [sample], setup)
                    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                    if round_:  # the first round warms up
                        found = figures(rollout, sample, count) | {"wall_s": wall, "cpu_s": cpu}
                        cells.setdefault((way, count), []).append(found)
    rows = []
    for (way, count), found in sorted(cells.items()):
        row: dict[str, Any] = {"dispatch": way, "windows": count, "episodes": len(found)}
        for name in COLUMNS:
            middle = statistics.median if name.endswith("_s") else statistics.fmean
            row[name] = round(middle(values[name] for values in found), 4)
        rows.append(row)
    return rows


def figures(rollout: Rollout, sample: Sample, count: int) -> dict[str, float]:
    """Raises RuntimeError if not exactly the given windows ran: the comparison would be of something else."""
    if rollout.call_count != count:
        raise RuntimeError(f"{sample.id}: {rollout.call_count} windows ran, {count} were given")
    conversations = (rollout.main, *rollout.subagents)
    written = sum(conversation.sampled_count for conversation in conversations)
    return {
        "accuracy": score(rollout, sample, RewardConfig()).accuracy,
        "turns": len(rollout.turns),
        "tokens_written": written,
        "tokens_read": sum(len(conversation.ids) for conversation in conversations) - written,
    }


def ratio(rows: Sequence[dict[str, Any]], way: str, count: int, name: str) -> float | None:
    """What `count` windows cost beside one, by this measure."""
    values = {row["windows"]: row[name] for row in rows if row["dispatch"] == way}
    return round(values[count] / values[1], 2) if count in values else None


def markdown(rows: Sequence[dict[str, Any]], picture: str, command: str, model: str) -> str:
    heads = ("windows", "dispatch", "accuracy", "turns", "tokens written", "tokens read", "wall s", "CPU s")
    lines = ["# Dispatch: what one more window costs", "", f"Made by `{command}`.", ""]
    lines += [
        f"Model `{model}`, {rows[0]['episodes']} greedy episodes a row, each run alone, with {FRAMES} "
        "overview frames. The windows are given, so that all ways look at the same ones; reports and answers "
        "are the model's own. Accuracy is over few questions and says little; what is measured are the "
        "costs. Seconds are medians.",
        "",
        f"![curves over the number of windows]({picture})",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + " ---: |" * len(heads),
    ]
    for row in sorted(rows, key=lambda row: (row["windows"], WAYS.index(row["dispatch"]))):
        cells = [row["windows"], row["dispatch"], f"{100 * row['accuracy']:.0f} %", f"{row['turns']:.1f}"]
        cells += [f"{row['tokens_written']:.0f}", f"{row['tokens_read']:.0f}"]
        cells += [f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    costs = [
        f"{way} {ratio(rows, way, 5, 'wall_s'):.2f} times the wall time and "
        f"{ratio(rows, way, 5, 'cpu_s'):.2f} times the CPU time"
        for way in WAYS
        if ratio(rows, way, 5, "wall_s")
    ]
    if costs:
        lines += ["", f"5 windows cost, beside 1 window: {'; '.join(costs)}."]
    return "\n".join(lines) + "\n"


def picture(rows: Sequence[dict[str, Any]]) -> bytes:
    titles = {
        "accuracy": "accuracy",
        "turns": "turns per episode",
        "wall_s": "wall seconds per episode",
        "cpu_s": "CPU seconds per episode",
        "tokens_written": "tokens written",
        "tokens_read": "tokens read",
    }
    curves = {
        title: {way: [(row["windows"], row[name]) for row in rows if row["dispatch"] == way] for way in WAYS}
        for name, title in titles.items()
    }
    return panels(curves, "windows")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--windows", type=int, default=8, help="from 1 to this many (%(default)s)")
    parser.add_argument("--questions", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="after one to warm up (%(default)s)")
    parser.add_argument("--out", type=Path, help="name of the files to write, without an ending")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    params = check(compose(["scale=tiny"]))
    with tempfile.TemporaryDirectory() as folder, open_model(options.model, params.visual) as opened:
        engine, encoder = opened
        asked = questions(params, Path(folder), options.questions)
        rows = measure(params, Forced(engine, encoder), asked, options.windows, options.rounds)
    for row in rows:
        print(json.dumps(row))
    if options.out:
        given = f"--windows {options.windows} --questions {options.questions} --rounds {options.rounds}"
        command = f"python -m bench.dispatch {given} --out {options.out}"
        name = options.model.name
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".png").write_bytes(picture(rows))
        options.out.with_suffix(".json").write_text(
            json.dumps({"model": name, "rows": rows}, indent=1) + "\n"
        )
        text = markdown(rows, f"{options.out.name}.png", command, name)
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
