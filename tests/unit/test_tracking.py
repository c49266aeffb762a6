"""Runs end as they ended, values arrive as they were, and an absent server costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
import resource
import shutil
import subprocess
import sys
import threading
import time

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
import pytest

from paravt.conversation import Conversation
from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, ToolCall, ToolError, Turn
from stages.params import compose, dump
from stages.tracking import Busy, Target, settle, stage_run
from stages.tracking.events import allowed
from stages.tracking.journal import Journal, Swept, abandoned
from stages.tracking.spans import choose, episode

DVC_YAML = """
stages:
  sft:
    cmd: python -m stages.sft
    deps: [data/prepared]
    params: [sft]
    outs: [models/sft]
"""


@pytest.fixture
def stage(project: Path) -> Path:
    """A project whose one stage is `sft`."""
    (project / "dvc.yaml").write_text(DVC_YAML)
    (project / "params.yaml").write_text(dump(compose()))
    (project / "data" / "prepared").mkdir(parents=True)
    (project / "data" / "prepared" / "sft.jsonl").write_text("{}\n")
    return project


def client(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project / 'mlflow.db'}")


def runs(project: Path) -> list[Run]:
    experiment = client(project).get_experiment_by_name("paravt")
    found = client(project).search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    return list(found)


def steps(project: Path, run: Run, metric: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(project).get_metric_history(run.info.run_id, metric)]


def make_model(project: Path) -> None:
    (project / "models" / "sft").mkdir(parents=True)
    (project / "models" / "sft" / "weights").write_text("w")


def test_a_finished_stage(stage):
    with stage_run("sft", {"sft": {"steps": 2, "lr": 1e-6}, "seed": 1, "method": "para_grpo"}) as reporter:
        reporter.metrics({"loss": 2.0}, 1)
        reporter.metrics({"loss": 1.5, "reward/total": 0.25}, 2)
        make_model(stage)
    (run,) = runs(stage)
    assert (run.info.run_name, run.info.status) == ("sft", "FINISHED")
    assert run.data.params == {"sft.steps": "2", "sft.lr": "1e-06", "seed": "1", "method": "para_grpo"}
    assert steps(stage, run, "loss") == [(1, 2.0), (2, 1.5)]
    assert run.data.metrics["reward/total"] == 0.25
    # DVC's own hashes: md5 of the listing of one file, for what was read and what was made
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, len(dataset.dataset.digest)) == ("data/prepared", 36)
    assert run.data.tags["dvc.out.models/sft"].endswith(".dir")
    assert len(run.data.tags["pipeline.hash"]) == 16
    assert run.data.tags["dvc.stage"] == "sft"
    (model,) = client(stage).search_logged_models([run.info.experiment_id])
    assert model.tags["dvc.hash"] == run.data.tags["dvc.out.models/sft"]
    assert list((stage / ".scratch" / "tracking").iterdir()) == []


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        (ValueError("bad row 7"), "FAILED", "ValueError: bad row 7"),
        (SystemExit(3), "FAILED", "exit 3"),
        (SystemExit("no data"), "FAILED", "exit no data"),
        (SystemExit(0), "FINISHED", None),
        (KeyboardInterrupt(), "KILLED", None),
    ],
)
def test_a_run_ends_as_its_stage_ended(project, end, status, error):
    with pytest.raises(type(end)), stage_run("ask"):
        raise end
    (run,) = runs(project)
    assert (run.info.status, run.data.tags.get("error")) == (status, error)
    assert run.info.end_time >= run.info.start_time


def test_a_resume_continues_the_run_and_repeats_nothing(stage):
    with pytest.raises(RuntimeError), stage_run("sft", {"sft": {"lr": 1e-6, "steps": 4}}) as reporter:
        first = reporter.scratch.folder
        for step in (1, 2, 3):
            reporter.metrics({"loss": 1 / step}, step)
        raise RuntimeError("disk")
    with stage_run("sft", {"sft": {"lr": 0.000001, "steps": 5}}) as reporter:
        assert reporter.scratch.folder == first
        for step in (3, 4):  # the checkpoint was older than the last step
            reporter.metrics({"loss": 1 / step}, step)
    (run,) = runs(stage)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in steps(stage, run, "loss")] == [1, 2, 3, 4]
    assert run.data.params == {"sft.lr": "1e-06", "sft.steps": "4"}
    assert run.data.tags["changed.sft.steps"] == "4 -> 5"
    assert "changed.sft.lr" not in run.data.tags
    assert run.data.tags["attempts"] == "2"
    assert run.data.tags["attempt 1 error"] == "RuntimeError: disk"
    assert "error" not in run.data.tags


def test_other_data_is_another_run_and_another_scratch_folder(stage):
    with pytest.raises(RuntimeError), stage_run("sft") as reporter:
        first = reporter.scratch.folder
        raise RuntimeError
    (stage / "data" / "prepared" / "sft.jsonl").write_text("{}\n{}\n")
    with stage_run("sft") as reporter:
        assert reporter.scratch.folder != first
        second = reporter.scratch.folder
    assert [run.info.status for run in runs(stage)] == ["FAILED", "FINISHED"]
    # what is not finished stays; what is finished goes when the next one starts
    assert first.exists() and second.exists()
    with stage_run("ask"):
        pass
    assert first.exists() and not second.exists()


def test_a_finished_scratch_folder_that_is_entered_again_is_not_finished(stage):
    with stage_run("sft") as reporter:
        folder = reporter.scratch.folder
    with pytest.raises(RuntimeError), stage_run("sft") as reporter:
        assert reporter.scratch.folder == folder
        raise RuntimeError("killed")
    with stage_run("ask"):
        pass
    assert folder.exists()  # what the second run needs to go on


def test_long_values_lie_in_an_artifact(project):
    long = "x" * 6001
    with stage_run("ask", {"prompt": long, "k": [4, 8]}):
        pass
    (run,) = runs(project)
    assert run.data.params["k"] == "[4, 8]"
    assert "6001 characters, see artifact params/prompt.txt" in run.data.params["prompt"]
    path = client(project).download_artifacts(run.info.run_id, "params/prompt.txt")
    assert Path(path).read_text() == long


def test_what_is_not_finite_is_left_out_and_counted(project):
    with stage_run("ask") as reporter:
        reporter.metrics({"loss": float("nan"), "norm": float("inf"), "kl": None, "reward": 1.0}, 1)
        reporter.metrics({"loss": float("nan")}, 2)
    (run,) = runs(project)
    assert {name for name in run.data.metrics if not name.startswith(("system/", "cost/"))} == {"reward"}
    assert {key: value for key, value in run.data.tags.items() if key.startswith("not_finite")} == {
        "not_finite.loss": "2",
        "not_finite.norm": "1",
        "not_finite.kl": "1",
    }


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("accuracy@K=4", "accuracy_K_4"),
        ("reward/total", "reward/total"),
        ("größe: 90%", "größe: 90_"),
        ("/a//b/../c", "a/c"),
        ("..", "_"),
    ],
)
def test_names_are_made_such_that_mlflow_takes_them(name, sent):
    assert allowed(name) == sent


def test_one_refused_event_keeps_nothing_back(project, monkeypatch):
    monkeypatch.setattr("stages.tracking.events.allowed", lambda name: name)
    with stage_run("ask") as reporter:
        reporter.tags({"a%b": "refused"})
        reporter.metrics({"loss": 1.0}, 1)
    (run,) = runs(project)
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 1.0)


def test_a_store_that_cannot_keep_up_is_asked_again(project, monkeypatch):
    """MLflow says BAD_REQUEST when its connections are used up, as it does for what can never be stored."""
    real, refused = MlflowClient.log_batch, []

    def busy(self, run_id, metrics=(), **more):
        if metrics and not refused:
            refused.append(run_id)
            raise MlflowException("QueuePool limit of size 5 overflow 10 reached", error_code=BAD_REQUEST)
        return real(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", busy)
    with stage_run("ask") as reporter:
        reporter.metrics({"loss": 1.0}, 1)
    settle(project)
    (run,) = runs(project)
    assert refused and steps(project, run, "loss") == [(1, 1.0)]


def test_plots_and_folders_are_kept_with_the_run(project):
    (project / "docs").mkdir()
    (project / "docs" / "index.html").write_text("<p>")
    (project / "loss.png").write_bytes(b"png")
    with stage_run("ask") as reporter:
        reporter.plots([project / "loss.png"])
        reporter.artifact(project / "docs", "data")
        (project / "loss.png").unlink()  # it was copied
    (run,) = runs(project)
    for path in ("plots/loss.png", "data/docs/index.html"):
        assert Path(client(project).download_artifacts(run.info.run_id, path)).exists()


def test_a_parent_from_the_environment(project, monkeypatch):
    monkeypatch.setenv("PIPELINE_RUN_ID", "f" * 32)
    with stage_run("ask"):
        pass
    (run,) = runs(project)
    assert run.data.tags["mlflow.parentRunId"] == "f" * 32


def test_tracking_that_is_away_stops_nothing_and_loses_nothing(project, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    began = time.time()
    with stage_run("ask", {"k": 4}) as reporter:
        for step in range(1, 4):
            reporter.metrics({"loss": 1 / step}, step)
    assert time.time() - began < 20
    assert len(list((project / ".scratch" / "tracking").iterdir())) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    time.sleep(0.05)
    assert set(settle(project).values()) == {"FINISHED"}
    (run,) = runs(project)
    assert (run.info.status, run.data.params) == ("FINISHED", {"k": "4"})
    assert steps(project, run, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert began <= run.info.start_time / 1000 + 0.01  # the times are those of the run, not of the sending
    assert list((project / ".scratch" / "tracking").iterdir()) == []


def test_the_same_work_twice_at_once_is_refused(stage):
    with stage_run("sft"), pytest.raises(Busy, match="is already running"), stage_run("sft"):
        pass


def test_a_record_that_was_cut_by_a_kill_is_read_to_its_last_whole_line(tmp_path):
    journal = Journal(tmp_path / "t" / "a").acquire()
    journal.append("start", name="a", tags={})
    journal.append("metrics", step=1, values={"loss": 1.0})
    with open(journal.events_file, "ab") as file:
        file.write(b'{"kind": "metr')
    assert [event["kind"] for event, _ in journal.events()] == ["start", "metrics"]
    assert list(abandoned(tmp_path / "t")) == []  # its writer lives
    journal.release()
    (found,) = abandoned(tmp_path / "t")
    found.append("end", status="KILLED")
    assert [event["kind"] for event, _ in found.events()] == ["start", "metrics", "end"]
    found.release()


def test_a_write_that_the_disk_cut_short_joins_no_other_event(tmp_path, caplog):
    journal = Journal(tmp_path / "a").acquire()
    journal.append("start", name="a", tags={})
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.events_file.stat().st_size + 20, most))
    try:
        journal.append("tags", values={"note": "half of this has room"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    journal.append("end", status="FINISHED")
    assert [event["kind"] for event, _ in journal.events()] == ["start", "end"]
    assert "cannot be written: File too large" in caplog.text and "unreadable" not in caplog.text
    journal.release()


def test_what_cannot_be_read_of_a_record_is_counted_and_keeps_nothing_back(project, caplog):
    journal = Journal(project / ".scratch" / "tracking" / "a").acquire()
    journal.append("start", name="a", tags={}, parent=None)
    with open(journal.events_file, "ab") as file:
        file.write(b'{"kind": "tags", "val{"kind": "tags", "values": {}}\n' + b"\0\xff" * 8 + b"\n")
    journal.append("end", status="FINISHED")
    for _ in range(2):
        assert [event["kind"] for event, _ in journal.events()] == ["start", "end"]
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == [f"unreadable events are passed over, {count} so far" for count in (1, 2)]
    journal.release()
    assert settle(project) == {"a": "FINISHED"}
    assert [run.info.status for run in runs(project)] == ["FINISHED"]


def test_a_record_that_is_swept_is_waited_for(tmp_path, caplog):
    sweeper = Journal(tmp_path / "a").acquire(sweeps=True)
    with pytest.raises(Busy, match="sending what an earlier attempt left"):
        Journal(tmp_path / "a").acquire(0.05)
    threading.Timer(0.2, sweeper.release).start()
    stage = Journal(tmp_path / "a").acquire(5.0)
    assert "a: process" in caplog.text and "waiting for that, up to 5 s" in caplog.text
    with pytest.raises(Busy, match="is already running"):
        Journal(tmp_path / "a").acquire(5.0)
    stage.release()


@pytest.mark.parametrize(
    ("signed", "kind"), [("1 sweeps", Swept), ("", Swept), (str(2**30), Swept), ("1", Busy)]
)
def test_who_holds_a_record_in_another_process(tmp_path, signed, kind):
    """`signed` is what the lock says; before its holder has signed, nothing or the name of a dead one."""
    (tmp_path / "lock").write_text(signed)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, 2); print(flush=True); input()"
    command = [sys.executable, "-I", "-c", hold, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(Busy) as caught:
            Journal(tmp_path).acquire()
        assert type(caught.value) is kind
        threading.Timer(0.2, holder.stdin.close).start()
        if kind is Swept:
            Journal(tmp_path).acquire(5.0).release()


def test_tracking_is_looked_up_before_a_record_is_locked(project, monkeypatch):
    journal = Journal(project / ".scratch" / "tracking" / "a").acquire()
    journal.append("start", name="a", tags={}, parent=None)
    journal.append("metrics", step=1, values={"loss": 1.0})
    last = [event["time"] for event, _ in journal.events()][-1]
    journal.release()
    opened = []

    class Slow(Target):
        def __init__(self, root: Path) -> None:
            Journal(journal.folder).acquire().release()  # the stage could have it
            opened.append(root)
            super().__init__(root)

    monkeypatch.setattr("stages.tracking.sink.Target", Slow)
    assert settle(project) == {"a": "KILLED"} and opened == [project]
    (run,) = runs(project)
    assert run.info.end_time == int(last * 1000), "it ended with the last that is known of it"


def test_a_run_whose_making_was_not_heard_of_is_taken(project, monkeypatch):
    real, made = MlflowClient.create_run, []

    def unheard(self, *given, **more):
        run = real(self, *given, **more)
        made.append(run.info.run_id)
        if len(made) == 1:
            raise MlflowException("Read timed out")
        return run

    monkeypatch.setattr(MlflowClient, "create_run", unheard)
    with stage_run("ask", {"k": 4}):
        pass
    settle(project)
    (run,) = runs(project)
    assert made == [run.info.run_id]
    assert (run.info.status, run.data.params) == ("FINISHED", {"k": "4"})


def test_events_without_the_start_of_their_run_keep_nothing_back(project, caplog):
    journal = Journal(project / ".scratch" / "tracking" / "a").acquire()
    journal.append("metrics", step=1, values={"loss": 1.0})
    journal.release()
    for _ in range(2):
        assert settle(project) == {"a": "KILLED"}
    assert caplog.text.count("a: 2 events belong to no run; its start was lost") == 1
    with stage_run("ask"):
        pass
    assert [run.info.status for run in runs(project)] == ["FINISHED"]


def test_a_store_that_is_being_made_is_never_half_made(tmp_path, monkeypatch, empty_store):
    """A kill while MLflow makes its tables would leave a file that never works again."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    seen = []

    class Slow(MlflowClient):
        def __init__(self, uri=None):
            path = Path(uri.removeprefix("sqlite:///"))
            if not path.exists():
                seen.append((tmp_path / "mlflow.db").exists())
                shutil.copyfile(empty_store, path)
            super().__init__(uri)

    monkeypatch.setattr("mlflow.MlflowClient", Slow)
    with stage_run("ask"):
        pass
    assert seen == [False]
    assert [path.name for path in tmp_path.glob("mlflow.db*")] == ["mlflow.db"]
    assert len(runs(tmp_path)) == 1


def sample() -> Sample:
    return Sample("q1", "data/v.mp4", "Same shape?", "B", "mcq", ("yes", "no"))


def rollout(sample_id: str = "q1") -> Rollout:
    """Two parallel crops, one of them outside the video, then the answer."""
    call = ToolCall("crop_video", {"start_time": 4.0, "end_time": 6.0})
    executions = (
        Execution(call, "ok", "A red circle at 4.5.", (4.0, 6.0), (4.0, 5.0), seconds=0.5),
        Execution(ToolError("no end_time"), "malformed", "no end_time"),
    )
    first = Turn("look", (call, ToolError("no end_time")), None, True, True)
    last = Turn("so", (), "B", True, True, answer_opened=True, answer_closed=True, answers=("B",))
    return Rollout(
        sample_id,
        [
            EpisodeTurn("<think>look</think>...", first, executions, span=(10, 40)),
            EpisodeTurn("<think>so</think><answer>B</answer>", last, span=(60, 70)),
        ],
        Conversation(0),
        [],
        "B",
        "answered",
        frame_budget=4,
        frames_seen=4,
        seconds={"main": 2.0, "subagents": 0.4, "decode": 0.1, "total": 2.6},
    )


def test_an_episode_is_a_tree_that_a_person_can_read():
    tree = episode(rollout(), sample(), step=3)
    assert [child["name"] for child in tree["children"]] == [
        "main turn 1",
        "crop 4.0-6.0 s",
        "call 2: malformed",
        "gather",
        "main turn 2",
    ]
    turn, crop, broken, gather, answer = tree["children"]
    assert tree["inputs"]["question"] == "Same shape?"
    assert (tree["outputs"]["answer"], tree["outputs"]["right answer"]) == ("B", "B")
    assert (turn["start_s"], turn["end_s"]) == (0.0, 1.5)  # 30 of 40 tokens of 2 s
    assert (crop["start_s"], broken["start_s"]) == (1.5, 1.5)  # side by side
    assert (crop["end_s"], answer["start_s"], answer["end_s"]) == (2.0, 2.0, 2.5)
    assert [child["outputs"]["report"] for child in crop["children"]] == ["A red circle at 4.5."]
    assert (broken["error"], broken["children"]) == ("no end_time", [])
    assert gather["outputs"] == {"texts": ["A red circle at 4.5.", "no end_time"]}
    assert json.loads(json.dumps(tree)) is not None


def test_rollouts_become_traces_of_the_run(project):
    with stage_run("ask") as reporter:
        reporter.know([sample()])
        reporter.rollouts([rollout(), rollout("q2")], step=5)
    (run,) = runs(project)
    traces = client(project).search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert len(traces) == 2
    (trace,) = [item for item in traces if "q1" in item.data.spans[0].name]
    spans = {span.name: span for span in trace.data.spans}
    assert set(spans) == {
        "episode q1",
        "main turn 1",
        "crop 4.0-6.0 s",
        "sub-agent",
        "call 2: malformed",
        "gather",
        "main turn 2",
    }
    assert spans["sub-agent"].parent_id == spans["crop 4.0-6.0 s"].span_id
    assert spans["crop 4.0-6.0 s"].parent_id == spans["episode q1"].span_id
    seconds = (spans["episode q1"].end_time_ns - spans["episode q1"].start_time_ns) / 1e9
    assert abs(seconds - 2.6) < 1e-3


def test_traces_are_sampled(project):
    with stage_run("ask") as reporter:
        for step in range(1, 21):
            reporter.rollouts([rollout() for _ in range(8)], step)
    (run,) = runs(project)
    traces = client(project).search_traces(
        locations=[run.info.experiment_id], run_id=run.info.run_id, max_results=100
    )
    assert len(traces) == 2 * (4 + 2)  # two of each of the first four calls, and of calls 10 and 20


def test_episodes_worth_opening_come_first():
    plain, cropped = rollout("plain"), rollout("cropped")
    plain.turns = plain.turns[1:]
    assert [item.sample_id for item in choose([plain, plain, cropped], 2)] == ["cropped", "plain"]
    assert choose([plain], 3) == [plain]
    assert choose([], 3) == []
