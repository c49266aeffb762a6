"""dvc.yaml tells the truth: each stage names the code it runs, and params.yaml states every value."""

from __future__ import annotations

import importlib
import re

import grimp
import pytest

from stages.definition import definitions
from stages.environment import SETTINGS
from stages.evaluate import NAMES
from stages.params import ROOT, check, compose, dump, read_yaml

STAGES = ("download", "validate", "sft", "para_grpo", "evaluate@sft", "report")

# Code that every stage runs and that shapes no output: how it is started, recorded, named and saved.
FRAME = {
    "paravt.checkpoints",
    "paravt.config",  # the values are in params.yaml, each of them (tested below)
    "paravt.errors",
    "paravt.reporter",
    "stages.command",
    "stages.definition",
    "stages.environment",
    "stages.launch",
    "stages.outputs",
    "stages.params",
    "stages.redact",
    "stages.scratch",
    "stages.supply",
}

_REWARDS = (".accuracy", ".format", ".published", ".score", ".tool")

# Where media come from; each is compared with the checksum in the table of media, so they are the same ones.
FRAME |= {
    f"paravt.data.{name}" for name in ("archives", "catalogue", "hub", "patience", "published", "transfer")
}

# Imported for their names or for a check; a change of them does not change what the stage writes.
BY_THE_WAY = {
    "download": {"paravt.chat", "paravt.conversation", "paravt.model", "paravt.protocol"},
    "validate": {
        "paravt.conversation",
        "paravt.weights",
        *(f"paravt.rewards{name}" for name in ("", *_REWARDS)),  # named by the benchmarks, scored elsewhere
    },
    "report": {"paravt.conversation", "paravt.data.media", "paravt.rollout", "paravt.weights"},
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("paravt", "stages", cache_dir=None)


def file_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (
        path.relative_to(ROOT) / "__init__.py" if path.is_dir() else path.relative_to(ROOT)
    ).as_posix() + ("" if path.is_dir() else ".py")


def code_of(imports: grimp.ImportGraph, module: str, left_out: set[str]) -> set[str]:
    """The module and what it imports, not followed into `left_out` and into tracking."""
    found, waiting = set(), [module]
    while waiting:
        item = waiting.pop()
        if item not in found | left_out and not item.startswith("stages.tracking"):
            found.add(item)
            waiting += imports.find_modules_directly_imported_by(item)
    return found


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_code_it_runs(imports, name):
    stage = definitions(ROOT)[name]
    module = f"stages.{name.partition('@')[0]}"
    assert stage.cmd.startswith(f"python -m {module}")
    missing = {
        file_of(item)
        for item in code_of(imports, module, FRAME | BY_THE_WAY.get(name, set()))
        if not any(file_of(item) == dep or file_of(item).startswith(f"{dep}/") for dep in stage.deps)
    }
    assert not missing


STUDY = read_yaml(ROOT / "study" / "dvc.yaml")["stages"]


@pytest.mark.parametrize("name", STUDY)
def test_a_stage_of_the_study_depends_on_the_code_it_runs(imports, name):
    stage = STUDY[name].get("do", STUDY[name])
    module = re.search(r"python -m (\S+)", stage["cmd"])[1]
    by_the_way = {"stages.curves"} | (
        set() if name == "base" else {"paravt.card"}
    )  # only `base` keeps a model
    if name in ("start", "other_start"):  # they are asked, not trained
        by_the_way |= imports.find_descendants("paravt.grpo") | {"paravt.grpo", "stages.para_grpo"}
        by_the_way |= {
            f"paravt.{name}" for name in ("export", "lora", "parallel", "segments", "state", "training")
        }
    deps = [dep.removeprefix("../") for dep in stage["deps"] if dep.startswith("../")]
    assert all((ROOT / dep).exists() for dep in deps if dep.startswith(("paravt", "stages", "conf/config")))
    missing = {
        file_of(item)
        for item in code_of(imports, module, FRAME | by_the_way)
        if not any(file_of(item) == dep or file_of(item).startswith(f"{dep}/") for dep in deps)
    }
    assert not missing
    assert "requirements/core.lock" in deps


def test_every_stage_depends_on_the_locked_environment():
    assert all("requirements/core.lock" in stage.deps for stage in definitions(ROOT).values())


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_names_is_there(name):
    stage = definitions(ROOT)[name]
    made = {out for other in definitions(ROOT).values() for out in other.outs}
    assert {dep for dep in stage.deps if dep not in made and not (ROOT / dep).exists()} == set()
    assert not any(dep.startswith(f"{out}/") for dep in stage.deps for out in made)  # DVC would miss a change


@pytest.mark.parametrize("name", ["download", "validate", "evaluate@sft", "report"])
def test_a_stage_depends_on_the_params_it_reads(name):
    source = (ROOT / "stages" / f"{name.partition('@')[0]}.py").read_text(encoding="utf-8")
    read = set(re.findall(r"\bparams\.([a-z_]+)", source)) - {"yaml", "load"}
    assert read <= {group.partition(".")[0] for group in definitions(ROOT)[name].params}


@pytest.mark.parametrize("name", STAGES)
def test_help_says_what_a_stage_reads_and_writes(name, capsys):
    module = importlib.import_module(f"stages.{name.partition('@')[0]}")
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert "Reads" in said and any(word in said for word in ("Writes", "Renders"))
    for out in definitions(ROOT)[name].outs:
        assert (out if "@" not in name else f"{out.rpartition('/')[0]}/NAME") in said


@pytest.mark.parametrize("name", STAGES)
def test_wrong_params_end_a_stage_with_one_sentence_before_any_work(name, project, capsys):
    (project / "params.yaml").write_text(dump(compose(["grpo.steps=0"])))
    stage, _, item = name.partition("@")
    module = importlib.import_module(f"stages.{stage}")
    with pytest.raises(SystemExit) as end:
        module.main([item] if item else [])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{name}: params.yaml: grpo.steps is 0; write a number above 0\n"
    assert not (project / ".scratch").exists()


def test_params_yaml_states_every_value():
    data = compose()
    assert check(data).model_dump(mode="json") == data


def test_the_makefile_exports_the_settings():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    exported = dict(re.findall(r"^export ([A-Z_]+) \?= (\S+)$", makefile, re.MULTILINE))
    assert {name: exported.get(name) for name in SETTINGS} == SETTINGS


def test_dvc_composes_params_from_conf_without_telemetry():
    config = (ROOT / ".dvc" / "config").read_text(encoding="utf-8")
    for line in ("analytics = false", "check_update = false", "enabled = true", "config_dir = conf"):
        assert line in config
    shown = read_yaml(ROOT / "dvc.yaml")["metrics"]
    assert shown == [f"reports/evaluate/{name}/headline.json" for name in NAMES]
