"""`paravt eval`: benchmarks asked and scored, runs compared, results beside the published table.

    paravt eval --model DIR --benchmarks videomme,lvbench
    paravt eval --endpoint URL --benchmarks mmvu --limit 100      answers by any OpenAI-compatible endpoint
    paravt eval fetch --benchmarks videomme --prompts longvt      tables, media, prompts of baselines
    paravt eval compare A B                                       two result folders, question by question
    paravt eval report A [B ...]                                  beside the published figures

A run that was stopped goes on where it was: give the same command again. Ends with 1 if more than the allowed
share of the questions failed or was skipped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import re
import sys
from typing import Any

from paravt.commands.asking import RESULTS, TOKENIZER, prepare
from paravt.commands.progress import Progress
from paravt.commands.shared import (
    FAILED,
    UsageError,
    a_share,
    counted,
    model_options,
    positive,
)

VERDICTS = Path(".scratch/verdicts")


def evaluate(options: argparse.Namespace) -> int:
    """Ask and score. The last line on standard error says why it ended with 1, if it did."""
    from paravt.benchmarks import session
    from paravt.benchmarks.summary import error_share

    plan, asking, open_engine, who, judge = prepare(options)
    with Progress(plan.out / "rollouts.jsonl" if options.save_rollouts else None) as progress:
        found = session.evaluate(plan, asking, open_engine, progress, who, judge)
    figures = {name: figures for name, (_, figures) in found.items()}
    _print(figures, options.json)
    if judge is not None and judge.counts:
        print(f"judge: {', '.join(f'{n} {what}' for what, n in judge.counts.items())}", file=sys.stderr)
    if plan.whole:
        print(f"results in {plan.out}", file=sys.stderr)
    else:
        print(
            f"part {plan.part[0] + 1} of {plan.part[1]} is in {plan.answers}; when all are, leave out --part",
            file=sys.stderr,
        )
    results = [result for results, _ in found.values() for result in results]
    share = error_share(results)
    if share > options.max_error_share:
        lost = sum(result.status in ("failed", "skipped") for result in results)
        print(
            f"paravt: {lost} of {len(results)} questions failed or were skipped ({share:.1%}, allowed "
            f"{options.max_error_share:.1%}); the same command asks the failed ones again",
            file=sys.stderr,
        )
        return FAILED
    return 0


def compare(options: argparse.Namespace) -> int:
    from paravt.benchmarks.pairing import pair, pairing_line
    from paravt.benchmarks.session import read_folder

    first, second = read_folder(options.first), read_folder(options.second)
    common = [name for name in first if name in second]
    if not common:
        raise UsageError(f"{options.first} and {options.second} have no benchmark in common")
    pairings = {name: pair(first[name], second[name]) for name in common}
    if options.json:
        print(json.dumps({name: found.to_json() for name, found in pairings.items()}))
    else:
        for name, found in pairings.items():
            print(pairing_line(name, found))
    return 0


def report(options: argparse.Namespace) -> int:
    from paravt.benchmarks.published import markdown
    from paravt.benchmarks.session import read_summary

    # the stage keeps them in reports/evaluate/MODEL/benchmarks
    paths = [folder.resolve() for folder in options.folders]
    names = [path.parent.name if path.name == "benchmarks" else path.name for path in paths]
    if len(set(names)) != len(names):
        raise UsageError("two folders have one name; name each after its model")
    page = markdown(
        {name: read_summary(folder) for name, folder in zip(names, options.folders, strict=True)},
        options.beside,
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page, encoding="utf-8")
    print(page, end="")
    return 0


def fetch(options: argparse.Namespace) -> int:
    from paravt.benchmarks import get
    from paravt.data.baselines import fetch_prompts
    from paravt.data.hub import fetch_benchmarks
    from paravt.data.media import media_root

    if not options.benchmarks and not options.upstream:
        raise UsageError("give --benchmarks, or --prompts, or both")
    if options.upstream:
        paths = fetch_prompts(options.upstream, options.prompts)
        print(f"{len(paths)} files of {', '.join(options.upstream)} in {options.prompts}")
    if not options.benchmarks:
        return 0
    names = [get(name).name.removesuffix("_wsub") for name in options.benchmarks]
    wanted = [name for name in dict.fromkeys(names) if name != "needles"]
    with Progress() as progress:
        files = fetch_benchmarks(
            wanted,
            options.tables,
            options.media or media_root(),
            options.rows,
            progress,
            licences=options.licences,
        )
    print(f"{len(files)} media files of {', '.join(wanted)} are here; tables in {options.tables}")
    return 0


def _print(figures: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    from paravt.benchmarks.breakdown import TABLE_HEAD, detail_lines, table_row

    table = Table(box=None, pad_edge=False)
    for place, head in enumerate(TABLE_HEAD):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    for found in figures.values():
        table.add_row(*table_row(found))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    console.print(table)
    for found in figures.values():
        console.print("\n".join(detail_lines(found)), soft_wrap=True)


def add_parser(commands: Any) -> None:
    """Add `eval` with its actions to the parser of `paravt`."""
    parser = commands.add_parser(
        "eval",
        help="ask benchmarks, compare runs, report beside the published table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=evaluate, force_think=None, max_turns=None, max_calls=None)
    _asking_options(parser)
    actions = parser.add_subparsers(metavar="ACTION")

    comparing = actions.add_parser("compare", help="two result folders, question by question")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--json", action="store_true", help="print one JSON object")
    comparing.set_defaults(command=compare)

    reporting = actions.add_parser("report", help="results beside the published table")
    reporting.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    reporting.add_argument("--beside", default="ParaVT-8B", help="published row to subtract (%(default)s)")
    reporting.add_argument("--out", type=Path, help="also write the page there")
    reporting.set_defaults(command=report)

    fetching = actions.add_parser("fetch", help="bring tables and media of benchmarks from the hub")
    fetching.add_argument("--benchmarks", type=_listed, metavar="A,B")
    fetching.add_argument(
        "--prompts",
        dest="upstream",
        type=_listed,
        metavar="A,B",
        help="published baselines, for upstream:NAME",
    )
    fetching.add_argument(
        "--licences",
        type=_listed,
        default=["apache-2.0", "mit"],
        metavar="A,B",
        help="licences that you accept; `unknown` is a repository that names none (apache-2.0,mit)",
    )
    fetching.add_argument("--rows", type=positive, help="media of the first rows only")
    _place_options(fetching)
    fetching.set_defaults(command=fetch)


def _asking_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--benchmarks", type=_listed, metavar="A,B", help="names, with commas between them")
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint instead of --model")
    parser.add_argument("--endpoint-model", metavar="NAME", help="its model, if it serves several")
    parser.add_argument("--limit", type=positive, help="that many questions of each, drawn by their ids")
    parser.add_argument("--out", type=Path, help=f"folder of results ({RESULTS}/MODEL)")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N", help="every N-th question, from I"
    )
    parser.add_argument(
        "--mode", help="prompt mode: direct, reasoning, agentic, agentic_minimal, upstream:NAME"
    )
    parser.add_argument("--max-new-tokens", type=positive, help="tokens of one turn")
    parser.add_argument(
        "--open-ended",
        choices=("f1", "exact", "judge", "leave_out"),
        default="f1",
        help="how open answers are scored (%(default)s)",
    )
    parser.add_argument(
        "--judge", metavar="URL", help="endpoint of the judge; its key is in PARAVT_JUDGE_KEY"
    )
    parser.add_argument("--judge-model", metavar="NAME")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS, help="kept verdicts (%(default)s)")
    parser.add_argument(
        "--subtitle-tokens", type=counted, default=8192, help="most of a prompt (%(default)s)"
    )
    parser.add_argument("--tokenizer", type=Path, help=f"for an endpoint: a model folder ({TOKENIZER})")
    parser.add_argument(
        "--prefill", action="store_true", help="the endpoint continues a begun message (vLLM)"
    )
    parser.add_argument("--in-flight", type=positive, default=16, help="requests at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (%(default)s)")
    parser.add_argument("--chunk", type=positive, default=64, help="episodes side by side (%(default)s)")
    parser.add_argument(
        "--max-error-share", type=a_share, default=0.02, help="above it, ends with 1 (%(default)s)"
    )
    parser.add_argument(
        "--save-rollouts", action="store_true", help="keep whole episodes in OUT/rollouts.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _place_options(parser)
    model_options(parser, temperature=0.0, needed=False, budget="--budget")


def _place_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=Path, default=Path("data/hub"), help="tables (%(default)s)")
    parser.add_argument("--media", type=Path, help="media root (PARAVT_MEDIA_ROOT, or data/media)")
    parser.add_argument(
        "--needles", type=Path, default=Path("data/prepared"), help="the needle split (%(default)s)"
    )
    parser.add_argument(
        "--prompts-folder",
        dest="prompts",
        type=Path,
        default=Path("data/upstream"),
        help="prompts of published baselines (%(default)s)",
    )


def _listed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("write names with commas between them")
    return names


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 2/8 for the second of eight")
    return int(match[1]) - 1, int(match[2])
