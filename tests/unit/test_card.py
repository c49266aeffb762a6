"""The card of a model folder: data, method, licence, citation, and nothing that changes between runs."""

from __future__ import annotations

import json

from pydantic import BaseModel
import pytest
from ruamel.yaml import YAML

from paravt.card import model_card, read_source, write_card
from stages.definition import definitions
from stages.params import ROOT, check, compose
from stages.prepare import CARD, Prepared


def params(*choices: str):
    return check(compose(list(choices)))


def source(params):
    """Of the published rows, as data/prepared/report.json has it; None without."""
    return params.data.hub and params.data.hub.model_dump(mode="json", include=CARD)


def card(params, stage: str) -> str:
    return model_card(params, stage, source(params))


class Watched:
    """A group of parameters that notes which are read, by their full names."""

    def __init__(self, group: BaseModel, read: set[str], prefix: str = "") -> None:
        self._group, self._read, self._prefix = group, read, prefix

    def __getattr__(self, name: str):
        value = getattr(self._group, name)
        if isinstance(value, BaseModel):
            return Watched(value, self._read, f"{self._prefix}{name}.")
        self._read.add(f"{self._prefix}{name}")
        return value


@pytest.mark.parametrize("stage", ["sft", "para_grpo"])
@pytest.mark.parametrize(
    "choices", [["scale=tiny"], ["scale=paravt_8b", "layout=1x80"], ["scale=paravt_mini", "sft.source=hub"]]
)
def test_a_card_depends_on_what_its_stage_declares(stage, choices):
    if "sft.source=hub" in choices:
        choices = [*choices, "data.hub.sft_model={repository: o/n, revision: main}"]
    chosen, read = params(*choices), set()
    model_card(Watched(chosen, read), stage, source(chosen))
    declared = definitions(ROOT)[stage].params
    assert (
        read
        and {
            name
            for name in read
            if not any(name == group or name.startswith(f"{group}.") for group in declared)
        }
        == set()
    )


@pytest.mark.parametrize("choices", [["scale=tiny"], ["scale=paravt_8b", "layout=8x80"]])
@pytest.mark.parametrize("stage", ["sft", "para_grpo"])
def test_each_card_has_its_parts_and_valid_metadata(choices, stage):
    made = card(params(*choices), stage)
    for heading in ("## Data", "## Method", "## Use", "## Licence", "## Citation"):
        assert made.count(f"\n{heading}\n") == 1
    meta = YAML(typ="safe").load(made.split("---")[1])
    assert meta["license"] == "apache-2.0" and meta["library_name"] == "transformers"
    assert "2605.20342" in made
    assert ("GRPO:" in made) == (stage == "para_grpo")
    assert made == card(params(*choices), stage)


def test_a_card_says_what_the_model_was_made_from():
    big = card(params("scale=paravt_8b", "layout=1x80"), "para_grpo")
    for word in (
        "ParaVT/ParaVT-Parquet",
        "selftrace",
        "adapters of rank 64, merged",
        "54 steps of 7 prompts",
    ):
        assert word in big
    assert "base_model: Qwen/Qwen3-VL-8B-Instruct" in big and "apache-2.0, mit" in big
    tiny = card(params(), "sft")
    assert "needle world" in tiny and "base_model:" not in tiny
    assert "600 samples for SFT, 32 x 32" in tiny and "400 questions for RL" in card(params(), "para_grpo")


def test_the_source_of_the_data_comes_with_the_data(tmp_path):
    report = tmp_path / "report.json"
    assert read_source(report) is None
    report.write_text('{"passed": true}')
    assert read_source(report) is None
    data = source(params("scale=paravt_8b"))
    ledgers = Prepared({}, {}, {}, {}, [], {}, {}, True, 0.2, data)
    report.write_text(json.dumps({"published": ledgers.to_json()}))
    assert read_source(report) == data


def test_it_is_the_folders_readme(tmp_path):
    write_card(tmp_path, params(), "sft")
    assert (tmp_path / "README.md").read_text().startswith("---\nlicense: apache-2.0\n")
