"""The whole pipeline on the published layouts: real client, hub on loopback, miniature repositories."""

from __future__ import annotations

import json
import os
from pathlib import Path
import shutil
import subprocess
from typing import NamedTuple

import pytest

from paravt.benchmarks import PUBLISHED
from paravt.data.media import read_manifest
from paravt.data.schema import read_traces
from paravt.protocol.families import FAMILIES
from paravt.rollout import read_samples
from tests.hub_server import TOKEN, HubServer
from tests.miniature import build
from tests.raw_host import RawHost
from tests.repository import copy_repository, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


MINI = ["-S", "scale=paravt_mini", "-S", "data.hub.prompts=[paravt]"]
MINI += ["-S", "evaluate.benchmark_mode=upstream:paravt"]


class Run(NamedTuple):
    repository: Path
    env: dict[str, str]
    hub: HubServer


def command(run: Run, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        words, cwd=run.repository, env=run.env, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`dvc exp run -S scale=paravt_mini` in a clone of this repository."""
    folder = tmp_path_factory.mktemp("mini")
    (folder / "repository").mkdir()
    with HubServer(build(folder / "hub"), page_size=5) as hub, RawHost(folder / "raw") as raw:
        repository = copy_repository(folder / "repository", ["scale=smoke"])
        env = environment(repository) | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN}
        env |= {"HF_HOME": str(folder / "home"), "PARAVT_RAW_URL": raw.url}
        env.pop("PARAVT_MEDIA_ROOT", None)
        made = Run(repository, env, hub)
        command(made, "dvc", "exp", "run", *MINI)
        yield made


def test_the_whole_pipeline_runs_on_the_published_layouts(run):
    said = {name: json.loads((run.repository / path).read_text()) for name, path in REPORTS.items()}
    assert said["validation"]["passed"]
    rows = said["validation"]["published"]["tables"]
    assert rows["published_sft"]["splits"]["selftrace"] == {"converted": 12}
    assert rows["published_sft"]["splits"]["museg"] == {"passed": 4}
    assert rows["published_sft"]["calls_merged"] > 0
    assert rows["published_sft"]["set_aside"] == {
        "its video cannot be used (it is in benchmark videomme)": 1,
        "media missing in longvt_source/videor1_0": 1,
    }
    assert rows["published_rl"]["rows"] == 12 and not rows["published_rl"]["set_aside"]
    suites = said["validation"]["suites"]
    benchmarks = {"videomme", "longvideobench", "lvbench", "mlvu", "mmvu", "charades"}
    assert suites.keys() == {"sft", "rl", "eval", "published_sft", "published_rl"} | benchmarks
    assert all(suite["passed"] and suite["rows"] for suite in suites.values())
    bucket = said["download"]["buckets"]["longvt_source/videor1_0"]
    assert (bucket["missing"], bucket["examples"]) == (1, ["longvt_source/videor1_0/gone.mp4"])
    assert said["download"]["repositories"]["longvideobench/LongVideoBench"]["gated"] is True
    text = (run.repository / "data/prepared/report.json").read_text()
    assert str(run.repository) not in text and str(run.repository) not in json.dumps(said["download"])


def test_the_report_puts_the_splits_beside_the_published_table(run):
    text = (run.repository / "reports/report/report.md").read_text()
    part = text.partition("## Beside the published table")[2].partition("## Training")[0]
    lines = part.splitlines()
    assert f"| model | kind | {' | '.join(PUBLISHED)} |" in lines
    assert "| ParaVT-8B | agentic | 62.1 | 69.4 | 60.4 | 39.8 | 65.0 | 68.6 | 50.1 |" in lines
    for name in ("base", "sft", "para_grpo"):
        assert any(line.startswith(f"| {name} | this run | ") for line in lines)
        assert any(line.startswith(f"| {name} | charades | ") for line in lines)
    assert "- base: 4 overview frames, published 64" in lines


COMMIT = FAMILIES["paravt"].commit
REPORTS = {"validation": "data/prepared/report.json", "download": "data/hub/report.json"}


def test_the_published_splits_are_asked_of_every_model(run):
    splits = {"videomme", "videomme_wsub", "longvideobench", "lvbench", "mlvu", "mmvu", "charades"}
    for name in ("base", "sft", "para_grpo"):
        folder = run.repository / "reports" / "evaluate" / name / "benchmarks"
        summary = json.loads((folder / "summary.json").read_text())
        assert set(summary) == splits and (folder / "charades.jsonl").is_file()
        states = [figures["counts"] for figures in summary.values()]
        assert all(0 < count["asked"] <= 4 for count in states)
        assert sum(count["answered"] + count["unparsed"] for count in states) > sum(
            count["failed"] + count["skipped"] for count in states
        )
        assert summary["charades"]["measure"] == "mIoU" and "macro" in summary["mlvu"]
        asked = summary["videomme"]["asked"]
        assert asked["episode"]["mode"] == "upstream:paravt" and asked["upstream"]["commit"] == COMMIT
        assert (asked["episode"]["dispatch"], asked["episode"]["force_think"]) == ("frames", False)


def test_training_used_the_published_rows_and_the_models_own_weights(run):
    traces = read_traces(run.repository / "data/prepared/sft.jsonl")
    samples = read_samples(run.repository / "data/prepared/rl.jsonl")
    assert {trace.sample.meta["source"] for trace in traces} >= {"selftrace", "charades", "museg", "videor1"}
    videos = {trace.sample.video for trace in traces} | {sample.video for sample in samples}
    assert all(video.startswith("data/media/ParaVT__ParaVT-Source/") for video in videos)
    named = read_manifest(run.repository / "data/prepared/media.jsonl")
    assert {f"data/media/ParaVT__ParaVT-Source/{file.path}" for file in named} == videos
    base = run.repository / "models/base"
    assert (base / "weights.json").is_file() and not list(base.glob("*.safetensors"))
    assert list((run.repository / "models/sft").glob("*.safetensors"))
    steps = (run.repository / "reports/sft/metrics.json").read_text()
    assert json.loads(steps)
    # media and weights are no outputs of a stage
    lock = (run.repository / "dvc.lock").read_text()
    assert "path: data/media" not in lock and "path: data/hub" in lock
    ignored = subprocess.run(
        ["git", "check-ignore", "data/media/x"], cwd=run.repository, check=False, timeout=20
    )
    assert ignored.returncode == 0


def test_nothing_changes_on_a_second_run_and_the_hub_is_not_asked(run):
    run.hub.requests.clear()
    assert "up to date" in command(run, "dvc", "repro")
    assert not run.hub.requests


def test_another_worker_brings_its_own_media_and_checks_them(run, tmp_path):
    elsewhere = run._replace(env=run.env | {"PARAVT_MEDIA_ROOT": str(tmp_path / "media")})
    said = command(elsewhere, "python", "-m", "stages.media")
    count = len(read_manifest(run.repository / "data/hub/manifest.jsonl"))
    assert f"media: {count} files fetched, 0 were in" in said
    assert "0 files fetched" in command(elsewhere, "python", "-m", "stages.media")
    shutil.rmtree(tmp_path / "media" / "blobs")
    away = elsewhere._replace(env=elsewhere.env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    said = command(away, "python", "-m", "stages.evaluate", "base", code=1)
    assert "6 times in a row; what is downloaded is kept, run again to go on" in said


def test_without_a_token_the_download_says_what_to_do(run, tmp_path):
    for name in ("models", "params.yaml"):
        os.symlink(run.repository / name, tmp_path / name)
    env = {name: value for name, value in run.env.items() if name != "HF_TOKEN"}
    env |= {"PARAVT_MEDIA_ROOT": str(tmp_path / "media"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/m.db"}
    said = command(run._replace(repository=tmp_path, env=env), "python", "-m", "stages.download", code=1)
    words = "longvideobench/LongVideoBench is gated; accept its terms at"
    assert [line for line in said.splitlines() if line.startswith(f"download: {words}")], said
    assert "Traceback" not in said and not list((tmp_path / "data").glob(".writing-*"))
    assert not list((tmp_path / "media").glob("blobs/*/*"))  # before anything was moved


def test_a_model_writes_the_reports_that_rows_lack(run):
    said = command(run, "python", "-m", "stages.reports")
    lines = [
        json.loads(line) for line in (run.repository / "data/reports/reports.jsonl").read_text().splitlines()
    ]
    assert len(lines) >= 4 and all(line["report"].strip() for line in lines)
    assert f"reports: {len(lines)} written to data/reports/reports.jsonl, of {len(lines)} windows" in said
    assert len({(line["video"], line["start_s"], line["end_s"]) for line in lines}) == len(lines)
    assert "reports: 0 written" in command(run, "python", "-m", "stages.reports")
    params = run.repository / "params.yaml"
    text = params.read_text()
    prepared = (run.repository / "data/prepared/sft.jsonl").read_text()
    try:
        params.write_text(text.replace("reports: row", "reports: model"))
        command(run, "python", "-m", "stages.validate")
        written = {line["report"] for line in lines}
        used = [
            result
            for trace in read_traces(run.repository / "data/prepared/sft.jsonl")
            for turn in trace.turns
            for result in turn.results
        ]
        assert written & set(used)
    finally:
        params.write_text(text)
        (run.repository / "data/prepared/sft.jsonl").unlink()
        (run.repository / "data/prepared/sft.jsonl").write_text(prepared)


def test_too_many_rows_set_aside_stop_the_pipeline_and_are_named(run, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("data", "models"):
        os.symlink(run.repository / name, copy / name)
    params = (run.repository / "params.yaml").read_text()
    assert "max_set_aside: 0.3" in params
    (copy / "params.yaml").write_text(params.replace("max_set_aside: 0.3", "max_set_aside: 0.01"))
    said = command(run._replace(repository=copy), "python", "-m", "stages.validate", code=1)
    assert (
        "suite published_sft, column row: at least 99% of the rows can be used, but 2 rows do not fit" in said
    )
    assert "videor1-000000 (videor1_0) (line" in said
    assert (run.repository / "data/prepared/sft.jsonl").is_file()  # what had passed is still there


def test_rl_starts_from_a_published_checkpoint_without_sft(run):
    """Last in this file: it changes what the other tests look at."""
    named = "{repository: ParaVT/ParaVT-SFT, revision: main}"
    choice = ["dvc", "exp", "run", *MINI, "-S", "sft.source=hub"]
    said = command(run, *choice, "-S", f"data.hub.sft_model={named}", "para_grpo")
    assert "sft: models/sft is ParaVT/ParaVT-SFT; nothing was trained" in said
    start = run.repository / "models/sft"
    assert json.loads((start / "weights.json").read_text())["repository"] == "ParaVT/ParaVT-SFT"
    assert not list(start.glob("*.safetensors"))
    assert list((run.repository / "models/para_grpo").glob("*.safetensors"))
    card = (run.repository / "models/para_grpo/README.md").read_text()
    assert "SFT: the published checkpoint `ParaVT/ParaVT-SFT` at `main`, as it is" in card
    assert json.loads((run.repository / "reports/sft/metrics.json").read_text())["steps"] == 0
    nothing_named = [*choice, "-S", "data.hub.sft_model=null", "para_grpo"]
    said = command(run, *nothing_named, code=255)  # what DVC makes of a failed stage
    assert "data.hub.sft_model names no checkpoint" in said
