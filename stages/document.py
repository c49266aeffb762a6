"""A page written once, read twice: Markdown for a repository, HTML that needs nothing but itself.

A page is a list of blocks. HTML carries its style and its pictures inside; no block holds a time, so equal
content gives equal bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
import html
from pathlib import Path
import re

STYLE = """
:root { color-scheme: light dark; --line: #d4d4d4; --soft: #f4f4f4; --quiet: #666; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #222; --quiet: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--soft); }
th[scope=row] { font-weight: normal; }
p, ul, figcaption { max-width: 50rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; background: #fff; }
figcaption { color: var(--quiet); font-size: .9rem; } code { background: var(--soft); padding: 0 .2em; }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells are plain text; the first column is aligned left, the others right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class Figure:
    """A PNG, stored as plots/NAME.png beside the Markdown."""

    name: str
    png: bytes
    caption: str


Block = Heading | Paragraph | Bullets | Table | Figure


def to_markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown; pictures are links to plots/NAME.png."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The page as one HTML file that opens offline."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def write_markdown(folder: Path, blocks: Sequence[Block]) -> None:
    """The page as FOLDER/report.md with its pictures in FOLDER/plots, which must not be there yet."""
    (folder / "plots").mkdir()
    for block in blocks:
        if isinstance(block, Figure):
            (folder / "plots" / f"{block.name}.png").write_bytes(block.png)
    (folder / "report.md").write_text(to_markdown(blocks), encoding="utf-8")


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(header, rows, caption):
            lines = [header, ["---", *("--:" for _ in header[1:])], *rows]
            table = "\n".join(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
            )
            return f"{table}\n\n{caption}"
        case Figure(name, _, caption):
            return f"![{caption}](plots/{name}.png)\n\n{caption}"


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + "\n</ul>"
        case Table(header, rows, caption):
            head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in header)
            body = "\n".join(
                f'<tr><th scope="row">{_inline(row[0])}</th>'
                + "".join(f"<td>{_inline(cell)}</td>" for cell in row[1:])
                + "</tr>"
                for row in rows
            )
            return (
                f'<figure><div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
                f"</tbody>\n</table></div><figcaption>{_inline(caption)}</figcaption></figure>"
            )
        case Figure(_, png, caption):
            data = base64.b64encode(png).decode()
            alt = html.escape(caption, quote=True)
            return (
                f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">'
                f"<figcaption>{_inline(caption)}</figcaption></figure>"
            )


def _inline(text: str) -> str:
    """Escaped text; `code` in backticks is marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
