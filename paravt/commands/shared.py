"""What commands share: settings of params.yaml under what was given, and the types of arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from paravt.config import EpisodeConfig, Group, VisualConfig, VLLMEngineConfig

if TYPE_CHECKING:
    from paravt.engines.limits import PromptLimits

Settings = TypeVar("Settings", bound=Group)

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
DEFAULT_FRAMES = 16
LARGEST_SEED = 2**31


class UsageError(ValueError):
    """Something given on the command line that cannot be used; the message says what to give."""


def settings(options: argparse.Namespace) -> tuple[VisualConfig, EpisodeConfig, int]:
    """Visual and episode settings of params.yaml, and the overview frames; what was given wins."""
    groups = read_params(options.params)
    source = options.params or "params.yaml"
    visual = group(VisualConfig, "visual", groups.get("visual") or {}, source)
    names = ("temperature", "dispatch", "mode", "max_new_tokens", "force_think", "max_turns", "max_calls")
    given = {name: getattr(options, name, None) for name in names}
    changes = {key: value for key, value in given.items() if value is not None}
    episode = group(EpisodeConfig, "episode", (groups.get("episode") or {}) | changes, source)
    choices = (groups.get("budget") or {}).get("choices") or [DEFAULT_FRAMES]
    return visual, episode, options.frames or max(choices)


def group(model: type[Settings], name: str, values: dict[str, Any], source: object) -> Settings:
    """One group of params.yaml, checked. Raises UsageError naming the first wrong key."""
    try:
        return model.model_validate_json(json.dumps(values))  # JSON mode: strict, yet a list is a tuple
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *(str(part) for part in first["loc"])])
        raise UsageError(f"{source}: {where}: {first['msg']}") from error


def read_params(given: Path | None) -> dict[str, Any]:
    """The groups of a params.yaml; none without a file, unless one was named."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    path = given or Path("params.yaml")
    if given is None and not path.is_file():
        return {}
    try:
        groups = YAML(typ="safe").load(path)
    except YAMLError as error:
        raise UsageError(f"{path}: not YAML") from error
    if not isinstance(groups, dict):
        raise UsageError(f"{path}: holds no groups; give a params.yaml")
    return groups


def servers(
    options: argparse.Namespace, visual: VisualConfig, episode: EpisodeConfig, frames: int
) -> tuple[VLLMEngineConfig, PromptLimits]:
    """How servers are started: the engine of params.yaml if that is vllm, else the defaults."""
    from paravt.engines.limits import PromptLimits

    given = read_params(options.params).get("engine") or {}
    values = given if given.get("name") == "vllm" else {}
    config = group(VLLMEngineConfig, "engine", values, options.params or "params.yaml")
    return config, PromptLimits.of(episode, visual, frames)


def model_options(
    parser: argparse.ArgumentParser,
    temperature: float | None,
    needed: bool = True,
    budget: str = "--frames",
) -> None:
    """What is asked, and how. `needed` is False where something else may stand in for a model folder."""
    parser.add_argument(
        "--model", type=Path, required=needed, help="model folder, for example models/para_grpo"
    )
    parser.add_argument(
        budget, dest="frames", type=positive, help="overview frames (the largest of budget.choices)"
    )
    parser.add_argument("--temperature", type=a_temperature, default=temperature, help="0 is greedy")
    parser.add_argument(
        "--dispatch", choices=("parallel", "sequential", "frames"), help="how calls are answered"
    )
    parser.add_argument("--seed", type=counted, default=1)
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="who samples (%(default)s)"
    )
    parser.add_argument("--params", type=Path, help="params.yaml to take settings from (./params.yaml)")


def positive(text: str) -> int:
    value = counted(text)
    if not value:
        raise argparse.ArgumentTypeError("write a whole number above 0")
    return value


def counted(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def a_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; write 0 or more")
    return value


def a_share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write a number from 0 to 1")
    return value
