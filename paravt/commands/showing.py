"""`paravt rollout show FILE`: the episodes of a file as a list, or one of them token by token.

    paravt rollout show FILE                     a line for each episode
    paravt rollout show FILE --index N           tokens with loss mask, advantages and anchors in colour
    paravt rollout show FILE --index N --text    turns, windows and reports as plain text
    paravt rollout show FILE --index N --json    the record

`paravt rollout run` writes the question and the model's folder beside each episode. For a file of bare
rollouts (`paravt eval --save-rollouts`) they are given: --table for the rewards, --model for the tokenizer.
Reward, anchoring and spread are those of params.yaml, or of the file that --params names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
import json
from pathlib import Path
import sys
from typing import TYPE_CHECKING, Any

from paravt import printing
from paravt.commands.shared import UsageError, counted, group, positive, read_params
from paravt.config import AnchoringConfig, GRPOConfig, RewardConfig, VisualConfig
from paravt.rollout import EpisodeRow, read_episodes, read_samples

if TYPE_CHECKING:
    from paravt.chat import ChatEncoder
    from paravt.showing import Member

UNSAID = {"steps": 1, "prompts_per_step": 1, "optimiser": {"learning_rate": 1e-6}}  # not looked at here


def show(options: argparse.Namespace) -> int:
    rows = _rows(options.file)
    if not rows:
        raise UsageError(f"{options.file} holds no episode")
    if options.index is None:
        for index, row in enumerate(rows):
            print(printing.episode_line(index, row.rollout))
        return 0
    if options.index >= len(rows):
        raise UsageError(f"{options.file} holds {len(rows)} episodes; --index goes from 0 to {len(rows) - 1}")
    row = rows[options.index]
    if options.json:
        print(json.dumps(row.to_json(), ensure_ascii=False))
        return 0
    tokenizer = options.model or (Path(row.model) if row.model else None)
    if options.text or tokenizer is None or not (tokenizer / "tokenizer.json").is_file():
        if not options.text:
            where = f"{tokenizer} holds no tokenizer.json" if tokenizer else "the file names no model"
            print(f"paravt: {where}; give --model to see tokens", file=sys.stderr)
        print(printing.episode_text(row.rollout))
        return 0
    _show_tokens(options, rows, tokenizer)
    return 0


def _show_tokens(options: argparse.Namespace, rows: Sequence[EpisodeRow], tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    from paravt.chat import ChatEncoder
    from paravt.showing import episode_view, print_view

    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True), VisualConfig())
    if encoder.image_pad_id != rows[options.index].rollout.main.image_pad_id:
        raise UsageError(f"the tokenizer of {tokenizer} is not the one that wrote {options.file}")
    members = _members(options, rows, encoder)
    shown = next(place for place, member in enumerate(members) if member.index == options.index)
    colour = {"auto": None, "always": True, "never": False}[options.colour]
    print_view(episode_view(encoder, members, shown), options.width, colour)


def _members(options: argparse.Namespace, rows: Sequence[EpisodeRow], encoder: ChatEncoder) -> list[Member]:
    """The chosen episode among those of its question and budget, rewarded if the question is known."""
    from functools import partial

    from paravt.grpo.batch import Group, with_bonus
    from paravt.grpo.credit import group_credit
    from paravt.rewards import score
    from paravt.showing import Member

    chosen = rows[options.index]
    same = [
        (index, row.rollout)
        for index, row in enumerate(rows)
        if (row.rollout.sample_id, row.rollout.frame_budget, row.model)
        == (chosen.rollout.sample_id, chosen.rollout.frame_budget, chosen.model)
    ]
    members = [Member(index, rollout) for index, rollout in same]
    sample = chosen.sample
    if options.table:
        found = {sample.id: sample for sample in read_samples(options.table)}
        sample = found.get(chosen.rollout.sample_id)
        if sample is None:
            raise UsageError(f"{options.table} does not hold the question {chosen.rollout.sample_id}")
    if sample is None:
        return members
    reward, anchoring, grpo = _settings(options)
    score_one = partial(score, sample=sample, config=reward)
    rewards = [with_bonus(score_one(rollout), rollout, anchoring, reward) for _, rollout in same]
    rollouts = [rollout for _, rollout in same]
    step = Group(sample, 0, chosen.rollout.frame_budget, rollouts, rewards)
    credits = group_credit(encoder, step, grpo, anchoring)
    return [
        replace(member, reward=one, credits=tuple(credit))
        for member, one, credit in zip(members, rewards, credits, strict=True)
    ]


def _settings(options: argparse.Namespace) -> tuple[RewardConfig, AnchoringConfig, GRPOConfig]:
    groups = read_params(options.params)
    source = options.params or "params.yaml"
    return (
        group(RewardConfig, "reward", groups.get("reward") or {}, source),
        group(AnchoringConfig, "anchoring", groups.get("anchoring") or {}, source),
        group(GRPOConfig, "grpo", UNSAID | (groups.get("grpo") or {}), source),
    )


def _rows(path: Path) -> list[EpisodeRow]:
    try:
        return list(read_episodes(path))
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path}: a line is not an episode ({type(error).__name__}: {error})") from error


def add_parser(actions: Any) -> None:
    """Add `show` to the actions of `paravt rollout`."""
    parser = actions.add_parser(
        "show",
        help="print episodes of a jsonl file, token by token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--index", type=counted, help="the episode to print, from 0; without it a list")
    parser.add_argument("--json", action="store_true", help="with --index: as one JSON object")
    parser.add_argument("--text", action="store_true", help="with --index: as plain text")
    parser.add_argument("--table", type=Path, help="jsonl file of questions, for rewards and advantages")
    parser.add_argument("--model", type=Path, help="model folder, for its tokenizer")
    parser.add_argument("--params", type=Path, help="params.yaml to take settings from (./params.yaml)")
    parser.add_argument("--width", type=positive, help="characters of a line (the terminal's)")
    parser.add_argument(
        "--colour", choices=("auto", "always", "never"), default="auto", help="(%(default)s: on a terminal)"
    )
    parser.set_defaults(command=show)
