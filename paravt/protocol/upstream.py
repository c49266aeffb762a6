"""Prompt modes of published baselines, `upstream:NAME`: their own words, read out of their own repositories.

A Family says where its prompt stands (repository, commit, file, name), how replies are written (its dialect),
how frames are marked and how crops go back. The texts are not kept in this project: `paravt.data.baselines`
fetches the files at the pinned commit, and the functions here cut the prompt out of them:

    python   a variable of a module, wherever it is assigned; a literal, or a literal given to json.dumps
    shell    the value of a key in an argument 'key="..."'
    text     the whole file
    tool     name, signature and docstring of a function

What the prompt leaves open is filled with the question; what a family has no words for is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
import hashlib
import json
import re
from typing import Any, Literal
import warnings

from paravt.config import UPSTREAM
from paravt.rollout import Sample

Kind = Literal["python", "shell", "text", "tool"]


class UpstreamError(ValueError):
    """A prompt that cannot be read or used; the message says what to do."""


@dataclass(frozen=True)
class Piece:
    """Where one text stands: in `file`, as the value called `name`; `key` picks one of a dict."""

    file: str
    kind: Kind
    name: str = ""
    key: str | None = None


Texts = Mapping[str, str]
Render = Callable[[Texts, Sample], tuple[str | None, str]]


@dataclass(frozen=True)
class Family:
    """A published baseline. `render` gives (system text, user text) of a question from its pieces.

    `mark` gives the text before frame number i (from 0) at a time, "" for none. `wrapped`: results go back in
    `<tool_response>`. `kinds` are the question types that it has words for. `differs` says in which ways a
    run here is not a run there.
    """

    name: str
    repository: str
    commit: str
    pieces: Mapping[str, Piece]
    render: Render
    dialect: str = "plain"
    max_turns: int = 0
    max_calls: int = 1
    mark: Callable[[int, float], str] = lambda number, time_s: ""
    wrapped: bool = True
    kinds: tuple[str, ...] = ("mcq", "tvg", "oe")
    differs: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.file for piece in self.pieces.values()))

    @property
    def has_tool(self) -> bool:
        return self.max_turns > 0

    @property
    def episode(self) -> dict[str, Any]:
        """The fields of an EpisodeConfig that are the family's own: rounds, calls, results."""
        rounds = {"max_turns": self.max_turns, "max_calls": self.max_calls}
        return {"mode": f"{UPSTREAM}{self.name}", "force_think": False, "dispatch": "frames"} | rounds


@dataclass(frozen=True)
class Upstream:
    """A family with its texts. `fingerprint` names all of them."""

    family: Family
    texts: Texts = field(repr=False)

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.family.name, self.family.commit, dict(sorted(self.texts.items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def told(self) -> dict[str, Any]:
        """What a summary says of it."""
        source = {"repository": self.family.repository, "commit": self.family.commit}
        return source | {"prompt": self.fingerprint, "differs": list(self.family.differs)}

    def prompt(self, sample: Sample) -> tuple[str | None, str]:
        """(system text or None, user text). Raises UpstreamError for a question that it has no words for."""
        if sample.question_type not in self.family.kinds:
            raise UpstreamError(f"{self.family.name} has no prompt for {sample.question_type} questions")
        return self.family.render(self.texts, sample)


# Cutting texts out of files.


def read_piece(source: str, piece: Piece) -> str:
    """The text that a piece names, out of the content of its file. Raises UpstreamError."""
    if piece.kind == "text":
        value: Any = source
    elif piece.kind == "shell":
        value = shell_value(source, piece.name)
    elif piece.kind == "tool":
        value = tool_text(source, piece.name)
    else:
        value = python_value(source, piece.name)
    if piece.key is not None:
        if not isinstance(value, dict) or piece.key not in value:
            raise UpstreamError(f"{piece.name} has no entry {piece.key!r}")
        value = value[piece.key]
    if isinstance(value, dict | list):
        value = json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        raise UpstreamError(f"{piece.name or 'the file'} holds no text")
    if value.startswith("FILL_FROM_"):
        raise UpstreamError(f"{piece.name} is a placeholder there, not a prompt")
    return value


def python_value(source: str, name: str) -> Any:
    """The first literal that is assigned to `name` anywhere in a module; nothing of the module is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UpstreamError(f"not a Python file ({error})") from error
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if not named or getattr(node, "value", None) is None:
            continue
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "json.dumps" and value.args:
            value = value.args[0]
        try:
            return ast.literal_eval(value)
        except (ValueError, RecursionError):
            continue
    raise UpstreamError(f"no text is assigned to {name}")


def shell_value(source: str, key: str) -> str:
    """The value of an argument 'key="value"' of a shell command. Inside the double quotes only \\\" is an
    escape, as in the overrides that such scripts pass on.
    """
    match = re.search(rf"'{re.escape(key)}=\"((?:[^'\"\\]|\\.|\"(?!'))*)\"'", source, re.DOTALL)
    if not match:
        raise UpstreamError(f"no argument '{key}=\"...\"' is there")
    return match[1].replace('\\"', '"')


def tool_text(source: str, name: str) -> str:
    """A function as a tool list shows it: name, signature, docstring."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UpstreamError(f"not a Python file ({error})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            words = ast.get_docstring(node)
            if words:
                return f"{name}({ast.unparse(node.args)})\n{words}"
    raise UpstreamError(f"no function {name} with a docstring is there")
