"""What runs are compared and found by: names, figures, costs, tables, links; and no secret in any of it."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
import pytest

from paravt.benchmarks.results import Result
from stages.headline import COLUMNS, TABLE, headline, table
from stages.params import compose, dump
from stages.redact import cover, redact, secrets, short
from stages.tracking import Target, pipeline_run, stage_run
from stages.tracking.cost import cost
from stages.tracking.links import maker, makers
from tests.unit.test_tracking import rollout, runs

SECRET = "hf-planted.0123/456+789"  # with characters that JSON and URLs escape
DVC_YAML = """
stages:
  sft:
    cmd: python -m stages.sft
    params: [seed, sft]
    outs: [models/sft]
  para_grpo:
    cmd: python -m stages.para_grpo
    deps: [models/sft]
    params: [anchoring]
    outs: [models/para_grpo]
  evaluate:
    matrix: {model: [sft, para_grpo]}
    cmd: python -m stages.evaluate ${item.model}
    deps: ["models/${item.model}"]
    params: [evaluate]
    outs: ["reports/evaluate/${item.model}"]
"""


@pytest.fixture
def pipeline(project: Path) -> Path:
    (project / "dvc.yaml").write_text(DVC_YAML)
    (project / "params.yaml").write_text(dump(compose()))
    return project


def result(name: str, budget: int, temperature: float = 0.0, **fields) -> Result:
    known = {"status": "answered", "score": 1.0, "compliant": True, "format": 1.0, "calls": 2}
    return Result(f"{name}{budget}", name, "mcq", budget, temperature, **(known | fields))


RESULTS = [
    result("a", 4),
    result("a", 8),
    result("b", 4, status="unparsed", score=None, calls=0),
    result("b", 8, status="failed", score=None, calls=None, reason="no frames"),
    result("a", 4, 1.0, compliant=False, format=0.5),
    result("b", 4, 1.0),
]


def test_headline_figures_have_the_same_names_everywhere():
    assert headline(RESULTS) == {
        "result/accuracy": 0.5,
        "result/accuracy_k4": 0.5,
        "result/accuracy_k8": 0.5,
        "result/accuracy_mcq": 0.5,
        "result/compliance_t1": 0.5,
        "result/format_reward_t1": 0.75,
        "result/tool_calls": 4 / 3,  # of the three episodes that ran
        "result/error_share": 1 / 6,
    }


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("sft", "sft (seed 7)"),
        ("para_grpo", "para_grpo (vanilla_grpo, seed 7)"),
        ("evaluate@sft", "evaluate@sft (seed 7)"),
        ("evaluate@para_grpo", "evaluate@para_grpo (vanilla_grpo, seed 7)"),
        ("study-vanilla_grpo", "study-vanilla_grpo (seed 7)"),
        ("pipeline", "vanilla_grpo, seed 7"),
    ],
)
def test_a_run_is_called_by_what_its_work_depends_on(pipeline, stage, shown):
    with stage_run(stage, {"method": "vanilla_grpo", "seed": 7}):
        pass
    (run,) = runs(pipeline)
    assert (run.info.run_name, run.data.tags["dvc.stage"]) == (shown, stage)


def test_arms_have_colours_of_their_own(pipeline):
    arms = ("para_grpo", "vanilla_grpo", "anchoring_only", "gating_only")
    for arm in arms:
        with stage_run("pipeline", {"method": arm}):
            pass
    assert len({run.data.tags["mlflow.runColor"] for run in runs(pipeline)}) == len(arms)


def test_costs_count_every_attempt():
    events = [
        {"kind": "start", "time": 100.0},
        {"kind": "metrics", "time": 110.0, "values": {"episodes": 8, "tokens_per_episode": 50.0}},
        {"kind": "start", "time": 1000.0},  # after a kill
        {
            "kind": "metrics",
            "time": 1005.0,
            "values": {
                "episodes": 8,
                "tokens_per_episode": 25.0,
                "frames_per_episode": 12.0,
                "loss_tokens": 90,
            },
        },
        {"kind": "spent", "time": 1006.0, "values": {"episodes": 2, "tokens_sampled": 10, "frames": 6}},
        {"kind": "now", "time": 1008.0},
    ]
    assert cost(events, gpus=4) == {
        "cost/wall_s": 18.0,
        "cost/gpu_h": 18.0 / 3600 * 4,
        "cost/episodes": 18.0,
        "cost/tokens_sampled": 610.0,
        "cost/frames": 102.0,
        "cost/tokens_trained": 90.0,
    }


def test_a_run_that_was_found_dead_did_not_last_until_it_was_found():
    events = [
        {"kind": "start", "time": 100.0},
        {"kind": "end", "time": 5000.0, "status": "KILLED", "ended": 110.0},
        {"kind": "start", "time": 6000.0},
        {"kind": "end", "time": 6005.0, "status": "FINISHED"},
    ]
    assert cost(events) == {"cost/wall_s": 15.0}


def test_rollouts_that_no_trainer_counts_are_costs(project):
    with stage_run("ask") as reporter:
        reporter.rollouts([rollout(), rollout("q2")], step=4)
    (run,) = runs(project)
    assert run.data.metrics["cost/episodes"] == 2
    assert run.data.metrics["cost/frames"] == 2 * (4 + 2)
    assert run.data.metrics["cost/wall_s"] > 0


def read_table(project: Path, run: Run) -> dict:
    path = MlflowClient(f"sqlite:///{project / 'mlflow.db'}").download_artifacts(run.info.run_id, TABLE)
    return json.loads(Path(path).read_text())


def test_an_evaluation_table_is_that_of_the_last_attempt(pipeline):
    for end in (RuntimeError, None):
        try:
            with stage_run("evaluate@sft") as reporter:
                reporter.table(COLUMNS, table(RESULTS), TABLE)
                if end:
                    raise end
        except RuntimeError:
            pass
    (run,) = runs(pipeline)
    found = read_table(pipeline, run)
    assert found["columns"] == list(COLUMNS)
    assert len(found["data"]) == len(RESULTS)  # not twice
    assert TABLE in run.data.tags["mlflow.loggedArtifacts"]  # as mlflow.log_table marks it


def test_a_stage_from_the_cache_leads_to_the_run_that_made_it(pipeline):
    def make(text: str) -> str:
        with stage_run("sft"):
            (pipeline / "models" / "sft").mkdir(parents=True, exist_ok=True)
            (pipeline / "models" / "sft" / "weights").write_text(text)
        return runs(pipeline)[-1].info.run_id

    first, second = make("one"), make("two")
    target = Target(pipeline)
    hashes = {run.info.run_id: run.data.tags["dvc.out.models/sft"] for run in runs(pipeline)}
    assert len(set(hashes.values())) == 2
    for run_id in (first, second):
        assert maker(target, "models/sft", hashes[run_id]).info.run_id == run_id
    lock = {"sft": {"outs": [{"path": "models/sft", "md5": hashes[first]}]}, "report": {}}
    assert {name: run.info.run_id for name, run in makers(target, lock).items()} == {"sft": first}
    assert maker(target, "models/sft", "0" * 32 + ".dir") is None


def test_a_pipeline_gathers_what_its_stages_found_and_cost(pipeline, monkeypatch):
    with pipeline_run("pipeline", {}, pipeline, {"prefect.flow_run_id": "f-1"}) as (_, inherited):
        for name, value in inherited.items():
            monkeypatch.setenv(name, value)
        with stage_run("evaluate@para_grpo") as reporter:
            reporter.summary(headline(RESULTS))
            reporter.rollouts([rollout()], step=4)
            (pipeline / "reports/evaluate/para_grpo").mkdir(parents=True)
            (pipeline / "reports/evaluate/para_grpo/results.jsonl").write_text("{}\n")
        child = runs(pipeline)[-1]
        out = {"path": "reports/evaluate/para_grpo", "md5": ""}
        out["md5"] = child.data.tags["dvc.out.reports/evaluate/para_grpo"]
        lock = {"schema": "2.0", "stages": {"evaluate@para_grpo": {"cmd": "x", "outs": [out]}}}
        (pipeline / "dvc.lock").write_text(json.dumps(lock))
    parent = next(run for run in runs(pipeline) if run.data.tags["dvc.stage"] == "pipeline")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags["prefect.flow_run_id"] == parent.data.tags["prefect.flow_run_id"] == "f-1"
    assert parent.data.metrics["result/accuracy"] == 0.5
    assert parent.data.metrics["cost/episodes"] == 1
    assert len(parent.data.tags["dvc.lock.md5"]) == 32


def test_a_secret_is_in_no_record_no_run_no_artifact_and_no_line(project, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", 'with"quote\\and-more')
    told = rollout()
    told.turns[0].executions[0].call.arguments["note"] = f"key {SECRET}"
    (project / "run.log").write_text(f"Authorization: Bearer {SECRET}\n")
    with pytest.raises(RuntimeError), stage_run("ask", {"key": SECRET, "long": SECRET * 60}) as reporter:
        reporter.rollouts([told], 1)
        reporter.artifact(project / "run.log")
        reporter.text(f"see https://me:{SECRET}@hub.example/x", "note.txt")
        reporter.tags({"where": "https://me:hunter22@hub.example", "quoted": 'a with"quote\\and-more'})
        cover()
        print(f"asked with {SECRET}")
        raise RuntimeError(f"401 for {SECRET}")
    (run,) = runs(project)
    assert run.data.tags["error"] == "RuntimeError: 401 for ***"
    assert run.data.tags["where"] == "https://***@hub.example"
    assert run.data.tags["quoted"] == "a ***"
    assert "asked with ***" in capsys.readouterr().out
    for path in project.rglob("*"):
        if path.is_file() and path.name != "run.log" or "mlartifacts" in path.parts and path.is_file():
            content = path.read_bytes()
            assert SECRET.encode() not in content and b"hunter22" not in content, path
            assert b"quote\\and-more" not in content and b"quote\\\\and-more" not in content, path


def test_switches_and_numbers_are_no_secrets(monkeypatch):
    for name in secrets():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MAX_TOKENS", "1000000")
    assert redact("false positives of 1000000") == "false positives of 1000000"
    assert redact("hf_" + "a1B2" * 8) == "***"


def test_the_projects_own_keys_are_secrets(monkeypatch):
    for number, name in enumerate(("PARAVT_JUDGE_KEY", "PARAVT_ENDPOINT_KEY", "PARAVT_VLLM_API_KEY")):
        monkeypatch.setenv(name, f"opensesame{number}")
    assert redact("a opensesame0 b opensesame1 c opensesame2") == "a *** b *** c ***"
    monkeypatch.setenv("KEYBOARD", "opensesame9")
    assert redact("opensesame9") == "opensesame9"


SIGNATURE = "kX3a%2FbQ9zT7m1vR5yU8wE2nL4pC6dH0jS%2BgF1iA%3D"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("> Authorization: Bearer swordfish", "> Authorization: Bearer ***"),
        ("{'Authorization': 'Basic YW5uOng=', 'a': 1}", "{'Authorization': 'Basic ***', 'a': 1}"),
        ('"{\\"authorization\\": \\"token swordfish\\"}"', '"{\\"authorization\\": \\"token ***\\"}"'),
        ("sent Bearer eyJhbGciOi.JIUzI1-NiJ9_x", "sent Bearer ***"),
        ("AccountName=a;AccountKey=c3dvcmQ=;End=x", "AccountName=a;AccountKey=***;End=x"),
        (f"https://a.example/b?sv=2024&sig={SIGNATURE}&se=1", "https://a.example/b?sv=2024&sig=***&se=1"),
        (f"?X-Amz-Signature={SIGNATURE}", "?X-Amz-Signature=***"),
        (f"SharedAccessSignature={SIGNATURE}", "SharedAccessSignature=***"),
        ("Authorization: Bearer ***", "Authorization: Bearer ***"),
    ],
)
def test_what_stands_where_a_secret_does_is_one(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "authorization: ask the owner of the bucket",
        "the bearer of this letter, Bearer internationalisation",
        "sig=0.0500000000000001, signature=forward, sign=1234567890123456789",
        "signature=(images, frames_per_second)",
        "AccountName=parallel; SharedAccessKeyName=RootManageSharedAccessKey",
    ],
)
def test_words_around_secrets_stay(text):
    assert redact(text) == text


def test_which_names_are_those_of_secrets(monkeypatch):
    for name in ("REGISTRY_AUTH", "AUTH_HEADER", "OAUTH_APP", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.setenv(name, f"swordfish {name}")
        assert redact(f"is swordfish {name}") == "is ***"
    for name in ("GIT_AUTHOR_NAME", "XAUTHORITY", "SSH_AUTH_SOCK", "PROXY_AUTH_TYPE", "CONNECTIONS"):
        monkeypatch.setenv(name, f"swordfish {name}")
        assert redact(f"is swordfish {name}") == f"is swordfish {name}"


def test_an_error_in_one_line():
    assert short(ValueError("first\nsecond")) == "first"
    assert short(TimeoutError()) == "TimeoutError"
