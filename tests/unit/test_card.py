"""The card of a model folder: data, method, licence, citation, and nothing that changes between runs."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from paravt.card import model_card, write_card
from stages.params import check, compose


def params(*choices: str):
    return check(compose(list(choices)))


@pytest.mark.parametrize("choices", [["scale=tiny"], ["scale=paravt_8b", "layout=8x80"]])
@pytest.mark.parametrize("stage", ["sft", "para_grpo"])
def test_each_card_has_its_parts_and_valid_metadata(choices, stage):
    card = model_card(params(*choices), stage)
    for heading in ("## Data", "## Method", "## Use", "## Licence", "## Citation"):
        assert card.count(f"\n{heading}\n") == 1
    meta = YAML(typ="safe").load(card.split("---")[1])
    assert meta["license"] == "apache-2.0" and meta["library_name"] == "transformers"
    assert "2605.20342" in card
    assert ("GRPO:" in card) == (stage == "para_grpo")
    assert card == model_card(params(*choices), stage)


def test_a_card_says_what_the_model_was_made_from():
    big = model_card(params("scale=paravt_8b", "layout=1x80"), "para_grpo")
    for word in (
        "ParaVT/ParaVT-Parquet",
        "selftrace",
        "adapters of rank 64, merged",
        "54 steps of 7 prompts",
    ):
        assert word in big
    assert "base_model: Qwen/Qwen3-VL-8B-Instruct" in big and "apache-2.0, mit" in big
    tiny = model_card(params(), "sft")
    assert "needle world" in tiny and "base_model:" not in tiny


def test_it_is_the_folders_readme(tmp_path):
    write_card(tmp_path, params(), "sft")
    assert (tmp_path / "README.md").read_text().startswith("---\nlicense: apache-2.0\n")
