from __future__ import annotations

from copy import deepcopy
from pathlib import Path
import re
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.data.needles import make_scene, overview_times_s
from stages.params import (
    HEADER,
    ROOT,
    ParamsError,
    canonical,
    check,
    compose,
    digest,
    dump,
    flatten,
    load,
    main,
)

TINY = compose()
METHODS = (
    "para_grpo",
    "vanilla_grpo",
    "anchoring_only",
    "gating_only",
    "published_vanilla",
    "published_para",
)


def committed_params() -> str:
    """params.yaml as it is committed, unless conf/ has been changed since: then as it lies there."""

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)

    committed = git("show", "HEAD:params.yaml")
    if committed.returncode == 0 and git("diff", "--quiet", "HEAD", "--", "conf").returncode == 0:
        return committed.stdout
    return (ROOT / "params.yaml").read_text(encoding="utf-8")


def test_params_yaml_is_the_tiny_composition_with_its_header():
    assert committed_params() == dump(compose())
    assert "discards hand edits" in HEADER


@pytest.mark.parametrize("scale", ["tiny", "smoke", "paravt_mini"])
@pytest.mark.parametrize("method", METHODS)
def test_each_composition_can_be_run(scale, method):
    params = check(compose([f"scale={scale}", f"method={method}"]))
    assert (params.scale, params.method) == (scale, method)


def test_arms_differ_by_their_part_alone():
    arms = {name: dict(flatten(compose([f"method={name}"]))) for name in METHODS[:4]}
    parts = {"method", "budget.gating", "anchoring.scope", "anchoring.weight"}
    for arm in arms.values():
        assert {key for key in arm if arm[key] != arms["para_grpo"][key]} <= parts
    seen = {name: (arm["budget.gating"], arm["anchoring.scope"]) for name, arm in arms.items()}
    assert seen == {
        "para_grpo": (True, "site"),
        "vanilla_grpo": (False, "off"),
        "anchoring_only": (False, "site"),
        "gating_only": (True, "off"),
    }


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+grpo.stepz=3"], "params.yaml: grpo.stepz is not a parameter (did you mean steps?); write one of"),
        (["grpo.steps=ten"], 'params.yaml: grpo.steps is "ten"; write a whole number'),
        (["grpo.steps=0"], "params.yaml: grpo.steps is 0; write a number above 0"),
        (["grpo.steps=2.5"], "params.yaml: grpo.steps is 2.5; write a whole number"),
        (["grpo.kl_weight=-1"], "params.yaml: grpo.kl_weight is -1; write a number of at least 0"),
        (
            ["anchoring.scope=sit"],
            'anchoring.scope is "sit" (did you mean site?); write one of site, structural, sequence, off',
        ),
        (["anchoring.scope=false"], "params.yaml: anchoring.scope is false; write 'off' in quotes"),
        (["budget.choices=[4,4]"], "params.yaml: budget.choices must be distinct positive frame counts"),
        (
            ["visual.min_pixels=2000"],
            "params.yaml: visual.min_pixels 2000 is above visual.max_pixels; write 1024",
        ),
        (
            ["data.needles.part_s=[1.0]"],
            "params.yaml: data.needles.part_s is [1.0]; write a list of two values",
        ),
        (
            ["data.needles.part_s=[9.0,6.0]"],
            "params.yaml: data.needles.part_s is [9.0, 6.0]; write [shortest",
        ),
        (["evaluate.questions_per_budget=300"], "write 256 or less"),
        (["grpo=null"], "params.yaml: grpo is null; write a group of keys"),
        (["~sft.steps"], "params.yaml: sft.steps is missing; add it"),
        (
            ["data.needles.parts=5"],
            "but there are 6 colours, and an overview of 4 frames has to show each part; write 4 or less",
        ),
        (
            ["data.needles.part_s=[4.0,9.0]"],
            "a part of 4 s has no room for it between margins of 0.5 s; write data.needles.part_s from 4.1",
        ),
        (["data.needles.needle_s=[0.05,3.0]"], "less than a frame at data.needles.fps 10; write 0.1 or more"),
        (["data.needles.size=33"], "data.needles.size is 33, and H.264 needs an even one; write 34"),
        (["budget.choices=[2,8]"], "budget.choices has 2, and an overview of so few frames may miss"),
        (["scale=paravt_8b", "budget.choices=[4,5,8]"], "parts of 60 to 80 s; write 4, or 6 or more"),
        (["evaluate.budgets=[4,4]"], "evaluate.budgets must be distinct positive frame counts"),
        (["evaluate.format_temperatures=[0.0,1.0]"], "format_temperatures must be distinct and above 0"),
        (["evaluate.format_temperatures=[1.0,1.0]"], "format_temperatures must be distinct and above 0"),
        (["episode.temperature=0"], "episode.temperature is 0, but a group of greedy episodes has no spread"),
        (
            ["evaluate.benchmarks=[lvbench]"],
            "asks lvbench, but the data of lvbench is not brought; write data.hub, as scale=paravt_8b has",
        ),
        (
            ["scale=paravt_mini", "evaluate.benchmarks=[lvbnch]"],
            "evaluate.benchmarks 'lvbnch' is not known (did you mean lvbench?); write one of videomme,",
        ),
        (
            ["scale=paravt_mini", "data.hub.benchmarks=[mlvu]", "evaluate.benchmarks=[mlvu,videomme_wsub]"],
            "asks videomme_wsub, but the data of videomme is not brought; add it to data.hub.benchmarks",
        ),
        (
            ["scale=paravt_mini", "data.hub.benchmark_rows=5"],
            "data.hub.benchmark_rows brings videos of 5 rows, but evaluate.benchmarks asks about all; write",
        ),
        (["scale=paravt_mini", "evaluate.benchmarks=[mlvu,mlvu]"], "evaluate.benchmarks names a split twice"),
        (
            ["scale=paravt_mini", "data.hub.prompts=[saga]"],
            "data.hub.prompts 'saga' is not known (did you mean sage?); write one of paravt,",
        ),
        (
            ["scale=paravt_mini", "data.hub.prompts=[video-thinker]"],
            "data.hub.prompts cannot bring video-thinker: where its prompt stands could not be verified;",
        ),
        (
            ["scale=paravt_mini", "data.hub.sft_splits=[charade]"],
            "data.hub.sft_splits 'charade' is not known (did you mean charades?); write one of charades,",
        ),
        (
            ["scale=paravt_mini", "+data.hub.revisions.charade=main"],
            "data.hub.revisions 'charade' is not known (did you mean charades?); write one of videomme,",
        ),
        (["+foo=1"], "params.yaml: foo is not a parameter; write one of anchoring, base_model"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(overrides, sentence):
    with pytest.raises(ParamsError) as refusal:
        check(compose(overrides))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.integers(2, 4),
    low=st.integers(42, 300),
    more=st.integers(0, 200),
    choice=st.integers(4, 12),
    index=st.integers(0, 10**6),
)
def test_each_overview_that_is_allowed_shows_each_part(parts, low, more, choice, index):
    data = deepcopy(TINY)
    data["data"]["needles"] |= {"parts": parts, "part_s": [low / 10, (low + more) / 10]}
    data["budget"]["choices"] = [choice]
    try:
        needles = check(data).data.needles
    except ParamsError:
        return
    scene = make_scene(needles, 1, "sft", index)
    seen_s = overview_times_s(scene.duration_s, needles.fps, choice)
    assert {scene.part_at(time_s).colour for time_s in seen_s} == {part.colour for part in scene.parts}
    assert all(part.start_s < part.needle_s[0] and part.needle_s[1] < part.end_s for part in scene.parts)


def test_an_overview_that_is_refused_misses_a_part_in_some_scene():
    needles = check(compose(["scale=paravt_8b"])).data.needles
    scenes = [make_scene(needles, 1, "sft", index) for index in range(300)]
    shown = [
        {scene.part_at(time_s).colour for time_s in overview_times_s(scene.duration_s, needles.fps, 5)}
        for scene in scenes
    ]
    assert any(len(colours) < needles.parts for colours in shown)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["scale=tinny"], "Could not find 'scale/tinny'"),
        (["method=pera_grpo"], "anchoring_only gating_only para_grpo"),
        (["grpo.stepz=3"], "grpo.stepz"),
    ],
)
def test_unknown_groups_are_refused_in_one_sentence(overrides, words):
    with pytest.raises(ParamsError) as refusal:
        compose(overrides)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_several_faults_give_the_first_and_a_count():
    with pytest.raises(ParamsError, match=r"grpo\.steps is 0; .* \(1 more after this one\)"):
        check(compose(["grpo.steps=0", "seed=1.5"]) | {"seed": 1} | {"foo": 1})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "is missing; run from the repository root"),
        ("", "holds no groups"),
        ("seed: [1\n", "line 2"),
        ("seed: 1\nseed: 2\n", "found duplicate key"),
    ],
)
def test_a_params_file_that_is_no_params_file(tmp_path: Path, content, sentence):
    path = tmp_path / "params.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ParamsError) as refusal:
        load(path)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path):
    path = tmp_path / "params.yaml"
    path.write_text(re.sub(r"learning_rate: \S+", "learning_rate: 1e-6", dump(compose())))
    assert load(path).grpo.optimiser.learning_rate == 1e-6


def test_write_composes_and_check_reads(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--write", "scale=smoke", "grpo.steps=3"]) == 0
    assert "scale smoke" in capsys.readouterr().out
    assert load("params.yaml").grpo.steps == 3
    before = Path("params.yaml").read_bytes()
    assert main(["--write", "grpo.steps=0"]) == 2
    assert "grpo.steps is 0" in capsys.readouterr().err
    assert Path("params.yaml").read_bytes() == before


def test_one_spelling_per_value():
    assert canonical(1e-6) == canonical(0.000001) == "1e-06"
    assert [canonical(value) for value in (True, None, 3, "a b", [4, 8])] == [
        "true",
        "null",
        "3",
        "a b",
        "[4, 8]",
    ]


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3), st.integers() | st.lists(st.integers(), max_size=2)
    )
)
def test_digest_depends_on_values_and_not_on_order(values):
    assert digest(values) == digest(dict(reversed(values.items())))
    assert digest(values) != digest(values | {"abcd": 1})


def test_the_vllm_engine_is_composed_whole():
    data = compose(["engine=vllm"])
    assert check(data).model_dump(mode="json") == data
    assert data["engine"]["name"] == "vllm"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.name=vlm"], 'engine.name is "vlm" (did you mean vllm?); write one of transformers, vllm'),
        (["~engine.name"], "engine.name is missing; add it"),
        (["engine=vllm", "engine.servers=0"], "engine.servers is 0; write a number of at least 1"),
        (["engine=vllm", "+engine.retrys=1"], "engine.retrys is not a parameter (did you mean retries?)"),
        (["engine.max_batch_tokens=0"], "engine.max_batch_tokens is 0; write a number above 0"),
        (
            ["engine=vllm", "engine.max_sequences=4"],
            "grpo.group_size is 8, but a server decodes engine.max_sequences 4 at a time; write 8 or more",
        ),
    ],
)
def test_a_wrong_engine_is_told_by_its_own_fields(overrides, sentence):
    with pytest.raises(ParamsError) as told:
        check(compose(overrides))
    assert sentence in str(told.value)


def test_a_baselines_prompt_must_be_brought():
    mini = ["scale=paravt_mini", "evaluate.benchmark_mode=upstream:sage"]
    with pytest.raises(ParamsError, match="whose prompt is not brought; add sage to data.hub.prompts"):
        check(compose(mini))
    assert check(compose([*mini, "data.hub.prompts=[sage]"])).evaluate.benchmark_mode == "upstream:sage"
    with pytest.raises(ParamsError, match="benchmark_mode"):
        check(compose(["evaluate.benchmark_mode=nonsense"]))
    with pytest.raises(ParamsError, match="write evaluate.benchmark_mode for the published splits"):
        check(compose(["episode.mode=upstream:sage"]))
