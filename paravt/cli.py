"""`paravt`: ask a model about a video, look at episodes, score them, check the machine.

    paravt ask VIDEO "question" --model DIR     one episode; prints windows, reports, answer, timings
    paravt rollout run TABLE --model DIR --out FILE
    paravt rollout show FILE --index N          an episode, its tokens in the colours of their credit
    paravt score FILE.jsonl
    paravt eval --model DIR --benchmarks a,b    benchmarks scored, resumable; also compare, report, fetch
    paravt serve DIR                            a vLLM server with our flags; PARAVT_VLLM_URLS then names it
    paravt doctor

Ends with 0 if the work was done, 1 if it was tried and failed, 2 if what was given cannot be used, 130 after
Ctrl-C. Errors are one sentence on standard error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
import json
import logging
import os
from pathlib import Path
import sys
from typing import Any

from paravt import printing
from paravt.commands import evaluating, showing
from paravt.commands.shared import (
    FAILED,
    INTERRUPTED,
    UNUSABLE,
    UsageError,
    model_options,
    positive,
    servers,
    settings,
)
from paravt.config import EpisodeConfig, VisualConfig
from paravt.engines.base import EngineError
from paravt.errors import sentence
from paravt.rollout import LETTERS, EpisodeRow, Rollout, Sample, read_samples, write_jsonl


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("paravt: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the boundary of a process
        words = sentence(error)
        if words is None:
            raise
        print(f"paravt: {words}", file=sys.stderr)
        return FAILED if isinstance(error, EngineError) else UNUSABLE


# Commands.


def ask(options: argparse.Namespace) -> int:
    from paravt.video import open_video

    visual, episode, frames = settings(options)
    sample = _question(options)
    with open_video(sample.video, timeout_s=visual.read_timeout_s) as video:
        duration_s = video.duration_s  # a file that cannot be read is told before a model is loaded
    [rollout] = _run(options, [sample], visual, episode, frames)
    if options.trace:
        _trace(rollout, sample)
    if options.json:
        print(
            json.dumps(printing.answer_json(rollout, sample) | {"duration_s": duration_s}, ensure_ascii=False)
        )
    elif rollout.stop_reason != "failed":
        print(f"video    {sample.video}, {duration_s:.1f} s")
        print(printing.answer_text(rollout, sample))
    if rollout.stop_reason == "failed":
        print(f"paravt: the episode failed: {rollout.error}", file=sys.stderr)
        return FAILED
    return 0


def rollout_run(options: argparse.Namespace) -> int:
    visual, episode, frames = settings(options)
    samples = read_samples(options.table)[: options.count]
    if not samples:
        raise UsageError(f"{options.table} holds no question")
    rollouts = _run(options, samples, visual, episode, frames, options.group)
    aside = options.out.with_name(f".{options.out.name}.writing")
    aside.parent.mkdir(parents=True, exist_ok=True)
    of = {sample.id: sample for sample in samples}
    write_jsonl(aside, (EpisodeRow(item, of[item.sample_id], str(options.model)) for item in rollouts))
    aside.replace(options.out)
    failed = [rollout for rollout in rollouts if rollout.stop_reason == "failed"]
    print(f"{len(rollouts)} episodes of {len(samples)} questions in {options.out}, {len(failed)} failed")
    if failed:
        print(f"paravt: {failed[0].sample_id} failed first: {failed[0].error}", file=sys.stderr)
    return FAILED if failed else 0


def score(options: argparse.Namespace) -> int:
    from paravt.scoring import score_file

    for row in score_file(options.file):
        print(json.dumps(row, ensure_ascii=False))
    return 0


def serve(options: argparse.Namespace) -> int:
    """Become the server: it takes this process's place, and signals reach it directly."""
    from paravt.engines.limits import ModelFacts
    from paravt.engines.server import KEY, ServerPlan, api_key, interpreter

    if not os.environ.get(KEY, "").strip():
        raise UsageError(f"set {KEY} to the key that the server shall ask for; its clients need the same")
    visual, episode, frames = settings(options)
    config, limits = servers(options, visual, episode, frames)
    plan = ServerPlan(config, options.model, ModelFacts.of(options.model), limits, visual)
    command = [str(interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
    command += plan.arguments(options.host, options.port)
    print(f"serving {options.model} as {plan.name} on http://{options.host}:{options.port}", flush=True)
    os.execve(command[0], command, plan.environment(api_key(required=True)))


def doctor(options: argparse.Namespace) -> int:
    from paravt import doctor as machine_doctor

    if options.layout:
        from paravt import plan as planning

        params = machine_doctor.composed(f"scale={options.scale}", f"layout={options.layout}")
        plan = planning.make_plan(params, planning.LAYOUTS[options.layout])
        print(json.dumps(planning.to_json(plan)) if options.json else planning.describe(plan))
        return 0 if plan.fits else 1
    machine = machine_doctor.inspect()
    if options.json:
        print(json.dumps(machine_doctor.to_json(machine), ensure_ascii=False))
    else:
        print(machine_doctor.describe(machine))
    return 0


# What the commands share.


def _question(options: argparse.Namespace) -> Sample:
    choices = tuple(options.options or ())
    kind = options.type or ("mcq" if choices else "oe")
    if not options.question.strip():
        raise UsageError("the question is empty")
    if kind == "mcq" and len(choices) < 2:
        raise UsageError("a choice needs at least 2 texts after --options")
    if len(choices) > len(LETTERS):
        raise UsageError(f"{len(choices)} options are too many; {len(LETTERS)} at most")
    if kind != "mcq" and choices:
        raise UsageError(f"--options go with --type mcq, not {kind}")
    # Nobody knows the right answer here; a placeholder fills the field, and nothing scores it.
    unknown: dict[str, Any] = {"mcq": "A", "tvg": (0.0, 0.0), "oe": ""}
    return Sample("ask", options.video, options.question, unknown[kind], kind, choices)


def _run(
    options: argparse.Namespace,
    samples: Sequence[Sample],
    visual: VisualConfig,
    episode: EpisodeConfig,
    frames: int,
    group: int = 1,
) -> list[Rollout]:
    from paravt.agent import AgentSetup, run_episodes
    from paravt.local import open_model

    served = servers(options, visual, episode, frames) if options.engine == "vllm" else ()
    with open_model(options.model, visual, *served) as (engine, encoder):
        setup = AgentSetup(encoder, episode, visual, lambda sample: frames, options.seed, group)
        return run_episodes(engine, samples, setup)


def _trace(rollout: Rollout, sample: Sample) -> None:
    """Hand the episode to each installed reporter: they are found by entry point, none is known here."""
    found = list(metadata.entry_points(group="paravt.reporters"))
    if not found:
        raise UsageError(
            "--trace: no reporter is installed; install the package with its extra `orchestrate`"
        )
    with ExitStack() as stack:
        for entry in found:
            reporter = stack.enter_context(entry.load()("ask", {"question": asdict(sample)["question"]}))
            reporter.rollouts([rollout], 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paravt", description="Ask a tool-calling model about a video.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    asking = commands.add_parser("ask", help="ask one question about one video")
    asking.add_argument("video", help="path or file:// URI")
    asking.add_argument("question")
    asking.add_argument("--options", nargs="+", metavar="TEXT", help="choices, for a question with letters")
    asking.add_argument("--type", choices=("mcq", "tvg", "oe"), help="choice, span of time, open (default)")
    asking.add_argument("--json", action="store_true", help="print one JSON object")
    asking.add_argument("--trace", action="store_true", help="hand the episode to the installed tracking")
    model_options(asking, temperature=0.0)
    asking.set_defaults(command=ask)

    rollouts = commands.add_parser("rollout", help="run episodes, or show them")
    actions = rollouts.add_subparsers(required=True, metavar="ACTION")
    running = actions.add_parser("run", help="run episodes over a table of questions")
    running.add_argument("table", type=Path, help="jsonl file of questions")
    running.add_argument("--out", type=Path, required=True, help="jsonl file to write")
    running.add_argument("--count", type=positive, help="only the first questions")
    running.add_argument("--group", type=positive, default=1, help="episodes per question (1)")
    model_options(running, temperature=None)
    running.set_defaults(command=rollout_run)
    showing.add_parser(actions)

    scoring = commands.add_parser("score", help="score rollouts that were made elsewhere")
    scoring.add_argument(
        "file",
        type=Path,
        help="one JSON object a line: question_type, answer, options, assistant_turns, executed",
    )
    scoring.set_defaults(command=score)

    serving = commands.add_parser("serve", help="serve a model by vLLM, for the engine vllm")
    serving.add_argument("model", type=Path, help="model folder, for example models/para_grpo")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serving.add_argument("--port", type=positive, default=8000, help="(%(default)s)")
    serving.add_argument("--frames", type=positive, help="overview frames (the largest of budget.choices)")
    serving.add_argument("--params", type=Path, help="params.yaml to take settings from (./params.yaml)")
    serving.set_defaults(command=serve, temperature=None, dispatch=None)

    evaluating.add_parser(commands)

    checking = commands.add_parser("doctor", help="what this machine has, and what each scale needs")
    checking.add_argument("--json", action="store_true", help="print one JSON object")
    checking.add_argument("--scale", default="paravt_8b", help="with --layout (%(default)s)")
    checking.add_argument(
        "--layout", choices=("8x80", "4x80", "1x80"), help="plan of memory and time on these GPUs"
    )
    checking.set_defaults(command=doctor)
    return parser


if __name__ == "__main__":
    sys.exit(main())
