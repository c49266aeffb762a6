"""The `paravt` command from arguments to what it prints, with a scripted engine and with a real one."""

from __future__ import annotations

from contextlib import nullcontext
import json
from pathlib import Path
import shutil
import subprocess
import sys

import av
import numpy as np
import pytest

from paravt import cli, doctor, local
from paravt.rollout import Sample, read_episodes, write_jsonl
from tests.fakes import ScriptedEngine
from tests.tiny import tiny_encoder, tiny_folder

ROOT = Path(__file__).resolve().parents[2]
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %d, "end_time": %d}}\n</tool_call>'
CALLS = "\n".join(CALL % window for window in ((1, 3), (4, 99)))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working folder with a clip of 6 s (its name is not plain), settings, and no repository around it."""
    monkeypatch.chdir(tmp_path)
    with av.open("mon été 1.mp4", "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(30):
            image = np.full((32, 32, 3), 5 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    settings = {
        "visual": {"min_pixels": 1024, "max_pixels": 1024},
        "episode": {"mode": "agentic_minimal", "max_new_tokens": 40, "subagent": {"max_new_tokens": 20}},
        "budget": {"choices": [4, 8]},
    }
    Path("params.yaml").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture
def scripted(monkeypatch):
    """The model says: two crops in one turn, then B. Its sub-agents say what they were asked about."""
    engine = ScriptedEngine(
        tiny_encoder(),
        lambda prompt: (
            f"report on {prompt.last_user.partition('.')[0]}"
            if prompt.is_subagent
            else (f"I look.\n</think>\n{CALLS}", "I know.\n</think>\n<answer>B</answer>")[prompt.turn]
        ),
    )
    monkeypatch.setattr(local, "open_model", lambda *_: nullcontext((engine, tiny_encoder())))
    return engine


def test_ask_prints_windows_reports_answer_and_times(place, scripted, capsys):
    code = cli.main(["ask", "mon été 1.mp4", "Which?", "--model", "m", "--options", "circle", "square"])
    out = capsys.readouterr().out
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "video    mon été 1.mp4, 6.0 s"
    assert lines[1] == "frames   8 of the whole video"
    assert lines[2].startswith("look 1   1.0 to 3.0 s, ")
    assert "report on Segment 1" in lines[3]
    assert any(line.startswith("look 2   4.0 to 6.0 s") and "cut to the video" in line for line in lines)
    assert "answer   B. square" in lines
    assert lines[-1].startswith("time     decode ") and "total " in lines[-1]


def test_ask_json_is_one_object_for_machines(place, scripted, capsys):
    uri = (place / "mon été 1.mp4").as_uri()
    assert (
        cli.main(["ask", uri, "Which?", "--model", "m", "--options", "a", "b", "--frames", "4", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] == found["answer"] == "B"
    assert found["frames_seen"] == 4 and found["duration_s"] == 6.0
    assert [look["status"] for look in found["looks"]] == ["ok", "ok"]
    assert found["looks"][0]["window_s"] == [1.0, 3.0] and found["looks"][1]["clamped"]
    assert set(found["seconds"]) == {"decode", "main", "subagents", "total"}


def test_ask_with_a_real_engine(place, capsys):
    """Weights of noise say nothing useful; the command still runs from file to words."""
    arguments = [
        "ask",
        "mon été 1.mp4",
        "Which shape?",
        "--model",
        str(tiny_folder()),
        "--frames",
        "4",
        "--json",
    ]
    assert cli.main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["frames_seen"] == 4
    assert first["stop_reason"] in ("answered", "no_answer", "truncated")
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["turns"] == first["turns"]  # greedy: the same words


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["none.mp4", "Which?"], "none.mp4"),
        (["empty.mp4", "Which?"], "empty.mp4"),
        (["mon été 1.mp4", " "], "the question is empty"),
        (["mon été 1.mp4", "Which?", "--options", "one"], "a choice needs at least 2 texts"),
        (["mon été 1.mp4", "Which?", "--type", "tvg", "--options", "a", "b"], "--options go with --type mcq"),
        (["mon été 1.mp4", "Which?", "--options", *"abcdefghijk"], "11 options are too many"),
        (["mon été 1.mp4", "Which?", "--params", "none.yaml"], "none.yaml: No such file"),
        (["mon été 1.mp4", "Which?", "--params", "bad.yaml"], "bad.yaml: visual.max_pixel"),
        (["mon été 1.mp4", "Which?"], "m is not a complete model folder: no config.json"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(place, capsys, arguments, words):
    (place / "empty.mp4").write_bytes(b"")
    (place / "bad.yaml").write_text("visual: {max_pixel: 1024}\n")
    assert cli.main(["ask", *arguments, "--model", "m"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("paravt: ") and words in err


def test_a_model_folder_with_cut_weights_is_told(place, capsys):
    shutil.copytree(tiny_folder(), "cut")
    weights = next(Path("cut").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    assert cli.main(["ask", "mon été 1.mp4", "Which?", "--model", "cut"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paravt: cut: the weights cannot be read") and err.count("\n") == 1


def test_ctrl_c_ends_with_130(place, scripted, capsys):
    def stop(prompt):
        raise KeyboardInterrupt

    scripted.reply = stop
    assert cli.main(["ask", "mon été 1.mp4", "Which?", "--model", "m"]) == 130
    assert capsys.readouterr().err == "paravt: stopped\n"


def test_rollouts_are_run_and_shown(place, scripted, capsys):
    samples = [
        Sample("q1", "mon été 1.mp4", "Which?", "B", "mcq", ("circle", "square")),
        Sample("q2", "none.mp4", "Which?", "B", "mcq", ("circle", "square")),
    ]
    write_jsonl("table.jsonl", samples)
    run = ["rollout", "run", "table.jsonl", "--model", "m", "--frames", "4", "--group", "2", "--out"]
    assert cli.main([*run, "out/r.jsonl"]) == 1  # one video is missing: told, and the others are kept
    out, err = capsys.readouterr()
    assert out == "4 episodes of 2 questions in out/r.jsonl, 2 failed\n"
    assert "q2 failed first" in err
    assert [row.rollout.sample_id for row in read_episodes("out/r.jsonl")] == ["q1", "q1", "q2", "q2"]
    assert [path.name for path in Path("out").iterdir()] == ["r.jsonl"]

    assert cli.main(["rollout", "show", "out/r.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "q1  answered  2 calls  'B'" in lines[0]
    assert cli.main(["rollout", "show", "out/r.jsonl", "--index", "0"]) == 0
    shown = capsys.readouterr().out
    assert "turn 1" in shown and "<tool_call>" in shown and "report on Segment 1" in shown
    assert "answer   B (answered)" in shown
    assert cli.main(["rollout", "show", "out/r.jsonl", "--index", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sample_id"] == "q1"
    assert cli.main(["rollout", "show", "out/r.jsonl", "--index", "4"]) == 2
    assert "--index goes from 0 to 3" in capsys.readouterr().err
    assert cli.main(["rollout", "show", "table.jsonl", "--index", "0"]) == 2
    assert "a line is not an episode" in capsys.readouterr().err
    assert cli.main([*run[:-1], "--count", "1", "--out", "out/one.jsonl"]) == 0


def test_score_prints_a_reward_a_line(place, capsys):
    row = {
        "question_type": "mcq",
        "answer": "B",
        "options": ["circle", "square"],
        "assistant_turns": ["<think>\nI see.\n</think>\n<answer>B</answer>"],
        "executed": [0],
    }
    Path("rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "A"}) + "\n")
    assert cli.main(["score", "rows.jsonl"]) == 0
    right, wrong = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (right["accuracy"], right["format"], right["tool"], right["total"]) == (1.0, 1.0, 0.0, 2.0)
    assert wrong["accuracy"] == 0.0
    Path("rows.jsonl").write_text('{"question_type": "mcq"}\n')
    assert cli.main(["score", "rows.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("paravt: rows.jsonl:1: field ")


def test_doctor_says_what_is_here_and_what_is_needed(place, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("cores", "memory", "disk", "gpus", "torch", "tiny:", "smoke:", "paravt_8b:"):
        assert word in out
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["cores"] >= 1
    assert set(found["scales"]) == {"tiny", "smoke", "paravt_8b"}
    assert found["scales"]["tiny"]["fits"] == (not found["scales"]["tiny"]["lacks"])


def test_doctor_names_what_is_lacking():
    small = doctor.Machine(1, 4.0, 3.0)
    tiny, big = doctor.SCALES[1], doctor.SCALES[2]
    assert doctor.lacks(small, tiny) == ["2 cores (has 1)", "8 GiB memory (has 4)", "6 GiB free disk (has 3)"]
    cards = (doctor.Gpu("card", 79.6),) * 8
    assert doctor.lacks(doctor.Machine(64, 1000.0, 5000.0, cards), big) == []
    assert doctor.lacks(doctor.Machine(64, 1000.0, 5000.0, cards[:4]), big) == [
        "8 GPUs of 74 GiB or more (has 4)"
    ]
    assert (
        doctor.lacks(doctor.Machine(2, 7.8, 50.0), tiny) == []
    )  # what the system keeps for itself is not missed


def test_wrong_usage_ends_with_2_and_says_what_to_write(place, capsys):
    for arguments in (
        [],
        ["look"],
        ["ask", "v.mp4"],
        ["ask", "v.mp4", "Which?", "--model", "m", "--frames", "0"],
        ["ask", "v.mp4", "Which?", "--model", "m", "--temperature", "nan"],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "is not a temperature" in capsys.readouterr().err


def test_the_module_is_a_command(place):
    done = subprocess.run(
        [sys.executable, "-m", "paravt.cli", "score", "none.jsonl"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "paravt: none.jsonl: cannot be read (No such file or directory)\n"
