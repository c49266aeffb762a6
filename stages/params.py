"""params.yaml: read once, checked whole, refused in one sentence.

    params = load()              # paravt.config.Params
    compose(["scale=smoke"])     # what `dvc exp run -S scale=smoke` writes

`python -m stages.params` checks params.yaml. With `--write` it composes the file anew from conf/, for example
`python -m stages.params --write scale=smoke method=vanilla_grpo`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
import hashlib
import json
from pathlib import Path
import sys
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, YAMLError

from paravt.config import Params
from stages.contradictions import closest, contradictions

ROOT = Path(__file__).resolve().parent.parent
PARAMS_FILE = "params.yaml"
HEADER = """\
# The tiny composition of conf/. `dvc exp run` composes this file anew from conf/ and discards hand edits:
# to try a value, write `dvc exp run -S grpo.steps=80`; to keep one, change conf/ and write this file with
# `python -m stages.params --write`. Plain `dvc repro` takes the file as it stands.
"""


class ParamsError(ValueError):
    """A params.yaml that cannot be run: one sentence that says what to write instead."""


def load(path: str | Path = PARAMS_FILE) -> Params:
    """The checked parameters. Raises ParamsError with one sentence naming the field and what to write."""
    return check(read_yaml(path), str(path))


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file, read as DVC reads it (YAML 1.2: `1e-4` is a number)."""
    try:
        return YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path} is missing; run from the repository root") from None
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}:" if where else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ParamsError(f"{path}:{line} {problem}; correct the line") from None
    except UnicodeDecodeError as error:
        raise ParamsError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def check(data: Any, source: str = PARAMS_FILE) -> Params:
    """`data` as Params. Raises ParamsError for the first thing that is wrong, and counts the others."""
    if not isinstance(data, Mapping):
        raise ParamsError(f"{source} holds no groups; compose it with `python -m stages.params --write`")
    try:
        # JSON mode: strict about kinds, yet a list is a tuple and 1 is 1.0
        params = Params.model_validate_json(json.dumps(data))
    except ValidationError as error:
        errors = error.errors()
        more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
        raise ParamsError(f"{source}: {_sentence(errors[0])}{more}") from None
    except TypeError as error:
        raise ParamsError(f"{source}: a value is of a kind that cannot be read ({error})") from None
    for sentence in contradictions(params):
        raise ParamsError(f"{source}: {sentence}")
    return params


def compose(overrides: Sequence[str] = (), conf: Path = ROOT / "conf") -> dict[str, Any]:
    """The values that Hydra composes from conf/ with `overrides` (`scale=smoke`, `grpo.steps=5`)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(conf), version_base=None):
            config = hydra_compose("config", overrides=list(overrides))
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split("Config search path")[0].split()).rstrip(". ")
        raise ParamsError(f"conf/ cannot be composed with {' '.join(overrides)}: {text}") from None


def dump(data: Mapping[str, Any]) -> str:
    """params.yaml as text, its header first."""
    from omegaconf import OmegaConf

    return HEADER + OmegaConf.to_yaml(OmegaConf.create(dict(data)))


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`("grpo.optimiser.learning_rate", 1e-4)`, ... in file order; lists are values."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def canonical(value: Any) -> str:
    """One spelling per value: 1e-6 and 0.000001 are the same text, a text stands for itself."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(", ", ": "))


def digest(*values: Any) -> str:
    """16 hex digits of the SHA-256 of the values' canonical JSON; models count by their values."""
    plain = [value.model_dump(mode="json") if isinstance(value, BaseModel) else value for value in values]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sentence(error: ErrorDetails) -> str:
    """One pydantic error as a sentence that says what to write."""
    location = [part for part in error["loc"] if isinstance(part, str | int)]
    name = ".".join(str(part) for part in _walk(location)[1])
    given = json.dumps(error["input"], ensure_ascii=False, default=str)
    given = given if len(given) <= 60 else given[:57] + "..."
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields_beside(location)
        return (
            f"{name} is not a parameter{closest(str(location[-1]), known)}; write one of {', '.join(known)}"
        )
    if kind == "missing" and isinstance(location[-1], int):
        return f"{name.rpartition('.')[0]} is {given}; write a list of two values"
    if kind == "missing":
        return f"{name} is missing; add it ({_help(location)})"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        if error["input"] is False and "off" in choices.split(", "):
            return f"{name} is false; write 'off' in quotes (a bare off reads as false)"
        return f"{name} is {given}{closest(str(error['input']), choices.split(', '))}; write one of {choices}"
    if kind == "union_tag_invalid":
        field, choices = context["discriminator"].strip("'"), context["expected_tags"].replace("'", "")
        close = closest(context["tag"], choices.split(", "))
        return f'{name}.{field} is "{context["tag"]}"{close}; write one of {choices}'
    if kind == "union_tag_not_found":
        return f"{name}.{context['discriminator'].strip(chr(39))} is missing; add it"
    if kind == "value_error":
        return str(context["error"])
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in limits:
        words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}[limits[kind]]
        return f"{name} is {given}; write a number {words} {context[limits[kind]]}"
    kinds = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text",
        "list_type": "a list",
        "tuple_type": "a list",
        "too_short": "a list of two values",
        "too_long": "a list of two values",
        "model_type": "a group of keys",
        "model_attributes_type": "a group of keys",
    }
    return f"{name} is {given}; write {kinds.get(kind, error['msg'])}"


def _walk(location: Sequence[str | int]) -> tuple[type[BaseModel] | None, list[str | int]]:
    """The group that a path of keys leads to, and the path without the names of variants (`engine.vllm`)."""
    model: type[BaseModel] | None = Params
    variants: dict[Any, type[BaseModel]] = {}
    names = []
    for part in location:
        if part in variants:
            model, variants = variants[part], {}
            continue
        names.append(part)
        field = model.model_fields.get(str(part)) if model else None
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        groups = [item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)]
        model = groups[0] if groups else None
        tag = field.discriminator if field else None
        variants = {group.model_fields[tag].default: group for group in groups} if tag else {}
    return model, names


def _fields_beside(location: Sequence[str | int]) -> list[str]:
    model = _walk(location[:-1])[0]
    return sorted(model.model_fields) if model else []


def _help(location: Sequence[str | int]) -> str:
    model = _walk(location[:-1])[0]
    field = model.model_fields.get(str(location[-1])) if model else None
    if field is None:
        return "see paravt/config.py"
    group = _walk(location)[0]
    text = field.description or (group.__doc__ if group else None) or "see paravt/config.py"
    return " ".join(text.split()).rstrip(".")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.params", description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="compose params.yaml from conf/ and write it")
    parser.add_argument(
        "--show", action="store_true", help="compose from conf/ and print; nothing is written"
    )
    parser.add_argument(
        "overrides", nargs="*", help="with --write or --show: scale=smoke, method=vanilla_grpo, grpo.steps=5"
    )
    options = parser.parse_args(arguments)
    try:
        if options.overrides and not (options.write or options.show):
            raise ParamsError("overrides are for --write or --show; add one")
        if options.write or options.show:
            data = compose(options.overrides)
            check(data, "conf/")
        if options.show:
            print(dump(data), end="")
            return 0
        if options.write:
            Path(PARAMS_FILE).write_text(dump(data), encoding="utf-8")
        params = load()
    except ParamsError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{PARAMS_FILE}: scale {params.scale}, method {params.method}, seed {params.seed}; it can be run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
