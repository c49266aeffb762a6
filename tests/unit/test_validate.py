"""Suites over real tables and clips: what passes, what fails, what could not be checked, what is told."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest

from paravt.data.schema import VideoFacts, question_frame, read_traces, trace_frame
from paravt.rollout import read_samples
from stages.suites import Outcome, new_context, question_suite, run_suite, trace_suite
from stages.validate import Validation, open_all, validate, write_prepared
from tests.unit.test_schema import VIDEOS, question, report, rows, trace

SECONDS = 10


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> bytes:
    """An H.264 clip of 10 s at 5 frames a second."""
    path = tmp_path_factory.mktemp("clip") / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(SECONDS * 5):
            image = np.full((32, 32, 3), 4 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


@pytest.fixture
def tables(tmp_path, monkeypatch, clip):
    """Writes the three tables, good unless other rows are given; returns their folder."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("sft.mp4", "rl.mp4", "eval.mp4")):
        Path(name).write_bytes(clip + b"\0\0\0\x08free" * number)  # the same picture, other content
    meta = {"duration_s": float(SECONDS)}

    def write(**given) -> Path:
        asked = {
            name: [
                question(id=f"{name}1", video=f"{name}.mp4", meta=meta),
                question(
                    id=f"{name}2",
                    video=f"{name}.mp4",
                    meta=meta,
                    question_type="tvg",
                    answer=[1, 3],
                    options=[],
                ),
                question(
                    id=f"{name}3",
                    video=f"{name}.mp4",
                    meta=meta,
                    question_type="oe",
                    answer="circle",
                    options=[],
                ),
            ]
            for name in ("sft", "rl", "eval")
        }
        good = {
            "sft": [trace(sample=asked["sft"][0]), report(sample=asked["sft"][0])],
            "rl": asked["rl"],
            "eval": asked["eval"],
        }
        folder = tmp_path / "needles"
        folder.mkdir()
        for name, table in (good | given).items():
            lines = "".join(json.dumps(row) + "\n" for row in table)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return folder

    write.meta = meta
    return write


def outcomes(frame, suite=None) -> list[Outcome]:
    return run_suite(new_context(), "rl", suite or question_suite(False), frame)


def judged(table, videos=VIDEOS) -> Validation:
    """One table of questions, judged alone."""
    return Validation({"rl": table}, {"rl": outcomes(question_frame(table, videos))}, videos)


def stopping(found) -> list[tuple[str, str | None, str]]:
    return [(o.expectation, o.column, o.status) for o in found if o.stops]


def test_good_tables_pass_and_are_written_in_one_spelling(tables, tmp_path):
    found = validate(tables(), docs=tmp_path / "docs")
    assert found.exit_code == 0, found.sentence()
    assert any(page.name == "index.html" for page in (tmp_path / "docs").rglob("*.html"))
    assert found.videos == {f"{name}.mp4": VideoFacts(duration_s=10.0) for name in ("sft", "rl", "eval")}
    assert found.warnings == [] or {o.says for _, o in found.warnings} == {"each question type occurs"}
    write_prepared(found, Path("prepared"))
    first = {path.name: path.read_bytes() for path in Path("prepared").iterdir()}
    assert sorted(first) == ["eval.jsonl", "report.json", "rl.jsonl", "sft.jsonl"]
    assert [sample.id for sample in read_samples("prepared/rl.jsonl")] == ["rl1", "rl2", "rl3"]
    assert [row.kind for row in read_traces("prepared/sft.jsonl")] == ["main", "subagent"]
    summary = json.loads(first["report.json"])
    assert summary["videos"] == {"named": 3, "opened": 3, "seconds": 30.0}
    assert summary["suites"]["sft"]["by"]["kind"] == {"main": 1, "subagent": 1}
    assert str(Path.cwd()).encode() not in first["report.json"]
    # The prepared tables are tables: validated and written again, they and the report are the same bytes.
    write_prepared(validate(Path("prepared")), Path("again"))
    assert {path.name: path.read_bytes() for path in Path("again").iterdir()} == first


def test_an_empty_table_fails_by_its_row_count_and_nothing_else_is_believed():
    found = judged([])
    assert found.exit_code == 1
    assert found.sentence().startswith("suite rl: the table has at least 1 row, but it has 0")
    rest = found.outcomes["rl"][1:]
    assert {outcome.status for outcome in rest} == {"could_not_run"}
    assert {outcome.note for outcome in rest} == {"the table has no rows"}


def test_a_missing_column_failed_and_its_checks_could_not_run():
    found = judged(rows(question(id="rl1", answer=...), question(id="rl2", answer=...)))
    assert found.exit_code == 1
    assert found.sentence().startswith("suite rl, column answer: the column exists, but it does not; ")
    states = {(o.says, o.status) for o in found.outcomes["rl"] if o.column == "answer"}
    assert ("the column exists", "failed") in states
    assert ("no value is null", "could_not_run") in states
    assert ("each answer fits its type and options", "could_not_run") in states


@pytest.mark.parametrize(
    "changes, column, words",
    [
        (
            {"answer": "E"},
            "answer: each answer fits its type and options",
            "1 row does not fit, first rl9 (line 2): answer 'E' is not a letter of its 2 options",
        ),
        ({"id": "rl1"}, "id: values are unique", "2 rows do not fit, first rl1 (line 1), rl1 (line 2)"),
        ({"question": None}, "question: no value is null", "1 row does not fit, first rl9 (line 2)"),
        ({"question": "  "}, "question: no question is blank", "1 row does not fit, first rl9 (line 2)"),
        (
            {"question_type": "yesno"},
            "question_type: each value is one of mcq, tvg, oe",
            "1 row does not fit, first rl9 (line 2): yesno",
        ),
        (
            {"question_type": "tvg", "answer": [8, 12]},
            "answer: each span lies inside its video",
            "1 row does not fit, first rl9 (line 2): span 8 to 12 s leaves the video of 10 s",
        ),
        (
            {"video": "none.mp4"},
            "video: each video opens",
            "1 row does not fit, first rl9 (line 2): missing",
        ),
        ({"video": "empty.mp4"}, "video: each video opens", "1 row does not fit, first rl9 (line 2): empty"),
        ({"meta": {}}, "meta.duration_s: no value is null", "1 row does not fit, first rl9 (line 2)"),
    ],
)
def test_a_bad_row_is_named_with_suite_column_and_id(tables, changes, column, words):
    Path("empty.mp4").write_bytes(b"")
    base = {"id": "rl1", "video": "rl.mp4", "meta": tables.meta}
    table = rows(question(**base), question(**(base | {"id": "rl9"} | changes)))
    videos = open_all([row.data["video"] for row in table], 60.0, lambda done, total, note: None)
    found = judged(table, videos)
    assert found.exit_code == 1
    assert found.sentence().startswith(f"suite rl, column {column}, but {words}")
    assert "\n" not in found.sentence()


def test_ids_that_are_numbers_fail():
    found = judged(rows(question(id=1), question(id=2)))
    assert ("expect_column_values_to_be_of_type", "id", "failed") in stopping(found.outcomes["rl"])


def test_a_target_that_does_not_parse_stops_and_another_answer_only_warns():
    broken = trace(id="t2", turns=[{"role": "assistant", "text": "look</think><answer>A"}])
    other = trace(id="t3", sample=question(answer="B"))
    found = outcomes(trace_frame(rows(trace(), broken, other), VIDEOS), trace_suite())
    stops = [outcome for outcome in found if outcome.stops]
    assert stops[0].sentence("sft") == (
        "suite sft, column turns: each target parses well formed, but 1 row does not fit, first t2 (line 2): "
        "turn 1 is not well formed: answer not closed"
    )
    [warning] = [o for o in found if o.severity == "warning" and o.status == "failed"]
    assert warning.rows == ("t2 (line 2)", "t3 (line 3)") and not warning.stops


def test_an_evaluation_video_in_a_training_table_stops(tables):
    shared = question(id="eval1", video="rl.mp4", meta=tables.meta)
    found = validate(tables(eval=[shared]))
    assert found.sentence().startswith("suite eval, column video: no video is in a training table, but 1 row")
    assert "also in rl" in found.sentence()
    # under another name it is the same video
    Path("copy.mp4").write_bytes(Path("rl.mp4").read_bytes())
    copied = question(id="eval1", video="copy.mp4", meta=tables.meta)
    Path("needles/eval.jsonl").write_text(json.dumps(copied) + "\n")
    assert "also in rl" in validate(Path("needles")).sentence()


def test_nulls_and_kinds_of_numbers():
    """[1, 2, None] is a whole-number column with a null; [1, "2", 3.0] is no number column at all."""
    null = trace_frame(rows(trace(), trace(id="t2"), trace(id="t3", frame_budget=None)), VIDEOS)
    found = stopping(outcomes(null, trace_suite()))
    assert found == [("expect_column_values_to_not_be_null", "frame_budget", "failed")]
    mixed = trace_frame(
        rows(trace(frame_budget=1), trace(id="t2", frame_budget="2"), trace(id="t3", frame_budget=3.0)),
        VIDEOS,
    )
    found = stopping(outcomes(mixed, trace_suite()))
    assert ("expect_column_values_to_be_of_type", "frame_budget", "failed") in found
    assert ("expect_column_values_to_be_between", "frame_budget", "could_not_run") in found


def test_a_check_that_breaks_is_told_apart_and_stops():
    frame = pd.DataFrame({"row": ["q1 (line 1)"], "id": ["q1"]})
    found = outcomes(frame, question_suite(False)[-4:-3])
    assert [o.status for o in found] == ["could_not_run"]
    assert found[0].stops
    assert "could not check that" in found[0].sentence("rl")
