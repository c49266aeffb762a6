"""An episode token by token: what was in the loss, what each token was credited with, and why.

    dim           not sampled: prompt, frames, tool results; runs of image pads are one mark
    plain         sampled, and in the loss with an advantage of 0
    background    the advantage: green above 0, red below, stronger with its size beside the group's largest
    underlined    a tag token of a structural site; its anchor is in the advantage, and listed below

Colours go with a terminal. Where they are lost (a pipe), the list of structural tokens still says all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from paravt.chat import ChatEncoder
from paravt.conversation import Conversation
from paravt.grpo.credit import Credit
from paravt.rewards import Reward
from paravt.rollout import Rollout

DIM = Style(color="grey50")
SAMPLED = Style(color="default", bold=True)
GREENS = ("#16341c", "#1d5a2a", "#23803a", "#2aa84a")
REDS = ("#3d1717", "#6b1f1f", "#9a2626", "#c92d2d")
BREAK = "↵\n"  # a line break is a token too: its colour needs a place


@dataclass(frozen=True)
class Member:
    """One episode of a group: its place in the file, its record, and its reward and credit if known."""

    index: int
    rollout: Rollout
    reward: Reward | None = None
    credits: Sequence[Credit] = ()


def token_texts(encoder: ChatEncoder, ids: Sequence[int]) -> list[str]:
    """The text of each token, end tokens and tags included. A character whose bytes are split over several
    tokens stands at the last of them."""
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = encoder.tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4:  # bytes of a character that is not whole yet
            texts.append("")
            continue
        texts.append(text)
        pending = []
    if pending:
        texts[-1] = encoder.tokenizer.decode(pending)
    return texts


def token_style(sampled: bool, advantage: float, structural: bool, largest: float) -> Style:
    """The colours of one token; `largest` is the largest size of an advantage in the group."""
    if not sampled:
        return DIM
    style = SAMPLED
    if advantage:
        shades = GREENS if advantage > 0 else REDS
        level = min(len(shades) - 1, int(len(shades) * abs(advantage) / largest))
        style += Style(bgcolor=shades[level], color="white")
    return style + Style(underline=True) if structural else style


def tokens_text(
    encoder: ChatEncoder, conversation: Conversation, credit: Credit, largest: float = 1.0
) -> Text:
    """A whole conversation, each token in its style."""
    text = Text()
    pads = 0
    total = credit.total
    ids = conversation.ids
    for position, piece in enumerate(token_texts(encoder, ids)):
        if ids[position] == conversation.image_pad_id:
            pads += 1
            if position + 1 == len(ids) or ids[position + 1] != conversation.image_pad_id:
                text.append(f"▦×{pads}" if pads > 1 else "▦", DIM)
                pads = 0
            continue
        sampled = bool(conversation.loss_mask[position])
        style = token_style(sampled, total[position], bool(credit.structural[position]), largest)
        text.append(piece.replace("\n", BREAK) if sampled else piece, style)
    return text


def episode_view(encoder: ChatEncoder, group: Sequence[Member], shown: int) -> RenderableType:
    """Everything about one episode: `shown` is its place in `group`, whose members share a question."""
    member = group[shown]
    rollout = member.rollout
    credits = list(member.credits) or [Credit.none(c) for c in (rollout.main, *rollout.subagents)]
    sizes = [np.abs(credit.total).max(initial=0.0) for other in group for credit in other.credits]
    largest = max(sizes, default=0.0) or 1.0
    parts: list[RenderableType] = [heading(member), legend(largest), Text()]
    parts.append(tokens_text(encoder, rollout.main, credits[0], largest))
    for number, (conversation, credit) in enumerate(zip(rollout.subagents, credits[1:], strict=True), 1):
        trained = "" if credit.trained else ", not trained on"
        parts += [Text(), Text(f"sub-agent {number}{trained}", style="bold cyan")]
        parts.append(tokens_text(encoder, conversation, credit, largest))
    parts += [Text(), *reward_lines(member)]
    if credits[0].structural.any():
        parts += [Text(), structural_table(encoder, rollout.main, credits[0])]
    if len(group) > 1:
        parts += [Text(), group_table(group, shown)]
    return Group(*parts)


def heading(member: Member) -> Text:
    rollout = member.rollout
    form = "well formed" if rollout.compliant else "not well formed"
    return Text(
        f"episode {member.index}: {rollout.sample_id}, {rollout.frames_seen} frames seen "
        f"(budget {rollout.frame_budget}), {rollout.call_count} calls run, {rollout.stop_reason}, {form}",
        style="bold",
    )


def legend(largest: float) -> Text:
    """What the colours mean, in the colours."""
    text = Text("legend   ")
    text.append("not in the loss", DIM)
    text.append("  ")
    text.append("in the loss", SAMPLED)
    text.append("  advantage ")
    for shade in reversed(REDS):
        text.append("   ", Style(bgcolor=shade))
    text.append(f" -{largest:.2f} .. +{largest:.2f} ")
    for shade in GREENS:
        text.append("   ", Style(bgcolor=shade))
    text.append("  ")
    text.append("structural token", SAMPLED + Style(underline=True))
    text.append("  ▦ one token of a frame")
    return text


def reward_lines(member: Member) -> list[Text]:
    """The reward in its parts, and in words why parts are missing or not full."""
    reward = member.reward
    if reward is None:
        return [Text("reward   not known: the file does not hold the question; give --table")]
    parts = f"total {_number(reward.total)} = accuracy {_number(reward.accuracy)}"
    parts += f", format {_number(reward.format)}, tool {_number(reward.tool)}"
    credit = member.credits[0] if member.credits else None
    lines = [Text(f"reward   {parts}")]
    lines += [Text(f"         {reason}") for reason in reward.reasons]
    mask = np.asarray(member.rollout.main.loss_mask, dtype=bool)
    if credit is None or not credit.trained:
        lines.append(Text("credit   none: the episode is left out of the loss"))
    elif mask.any():
        lines.append(Text(f"credit   advantage of the total in its group {credit.group[mask][0]:+.4f}"))
    return lines


def structural_table(encoder: ChatEncoder, conversation: Conversation, credit: Credit) -> Table:
    """The structural tokens one by one: position, text, and the two parts of the advantage."""
    table = Table(title="structural tokens", title_justify="left", box=None, pad_edge=False)
    for name in ("token", "text", "group", "anchor", "advantage"):
        table.add_column(name, justify="left" if name == "text" else "right")
    texts = token_texts(encoder, conversation.ids)
    for position in np.flatnonzero(credit.structural):
        anchor = credit.anchor[position]
        colour = "green" if anchor > 0 else "red" if anchor < 0 else ""
        table.add_row(
            str(position),
            Text(repr(texts[position])),
            f"{credit.group[position]:+.4f}",
            Text(f"{anchor:+.4f}", style=colour),
            f"{credit.total[position]:+.4f}",
        )
    return table


def group_table(group: Sequence[Member], shown: int) -> Table:
    """The episodes of the same question at the same budget, with the rewards they were compared by."""
    table = Table(title="group", title_justify="left", box=None, pad_edge=False)
    for name in (
        "",
        "episode",
        "total",
        "accuracy",
        "format",
        "tool",
        "advantage",
        "calls",
        "ended",
        "answer",
    ):
        left = name in ("ended", "answer")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "answer")
    for place, member in enumerate(group):
        reward, rollout = member.reward, member.rollout
        parts = ("total", "accuracy", "format", "tool")
        numbers = [_number(getattr(reward, part) if reward else None) for part in parts]
        mask = np.asarray(rollout.main.loss_mask, dtype=bool)
        trained = bool(member.credits) and member.credits[0].trained and mask.any()
        advantage = f"{member.credits[0].group[mask][0]:+.4f}" if trained else "-"
        table.add_row(
            ">" if place == shown else "",
            str(member.index),
            *numbers,
            advantage,
            str(rollout.call_count),
            rollout.stop_reason,
            Text(rollout.answer or ""),
        )
    return table


def print_view(view: RenderableType, width: int | None = None, colour: bool | None = None) -> None:
    """To standard output; colours where it is a terminal, unless `colour` says otherwise."""
    options = {} if colour is None else {"force_terminal": colour, "no_color": not colour}
    Console(width=width, highlight=False, markup=False, soft_wrap=False, **options).print(view)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
