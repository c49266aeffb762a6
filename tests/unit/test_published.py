"""Suites over published rows and benchmarks: what stops, what warns, what is named."""

from __future__ import annotations

from pathlib import Path
import shutil

import pytest

from paravt.data.facts import declared, examine, learn_facts
from paravt.data.media import MediaFile, MediaStore, media_path, resolve_media, sha256_of, write_manifest
from paravt.data.published import SOURCES
from paravt.data.schema import Row, VideoFacts, ledger_frame, question_frame
from paravt.data.training import Fate, Ledger, ledger_rows
from paravt.weights import write_reference
from stages import supply
from stages.params import check, compose
from stages.prepare import asked_of, load_benchmarks, model_reports
from stages.published import notes
from stages.reports import write_reports
from stages.suites import benchmark_suite, new_context, published_suite, run_suite
from tests.benchmark_tables import place_in, write_split
from tests.clips import write_clip, write_truncated
from tests.fakes import ScriptedEngine
from tests.tiny import VISUAL, tiny_encoder


def judged(name, suite, frame):
    return run_suite(new_context(), name, suite, frame)


def ledger(used: int, lost: int) -> Ledger:
    fates = [Fate(f"tvg-{n}", "tvg", "converted") for n in range(used)]
    return Ledger(
        fates
        + [Fate(f"tvg-{used + n} (r{n})", "tvg", "set aside", "a call cannot be read") for n in range(lost)]
    )


def test_rows_set_aside_warn_below_the_share_and_stop_above_it():
    rows = ledger_rows(ledger(18, 2))
    few = judged("published_sft", published_suite(0.1), ledger_frame(rows))
    assert not any(outcome.stops for outcome in few)
    [warning] = [outcome for outcome in few if outcome.status == "failed"]
    assert warning.sentence("published_sft") == (
        "suite published_sft, column row: each row can be used, but 2 rows do not fit, first "
        "tvg-18 (r0) (line 19), tvg-19 (r1) (line 20): a call cannot be read"
    )
    many = judged("published_sft", published_suite(0.05), ledger_frame(rows))
    [stop] = [outcome for outcome in many if outcome.stops]
    assert stop.says == "at least 95% of the rows can be used" and stop.rows
    nothing = judged("published_sft", published_suite(0.5), ledger_frame(ledger_rows(ledger(0, 0))))
    assert [outcome.status for outcome in nothing if outcome.stops] == ["failed", *["could_not_run"] * 4]


def benchmark(count: int, bad: int, shared: bool):
    data = [
        {"id": f"q{n}", "video": "v.mp4", "question": "Which?", "question_type": "mcq", "answer": "A"}
        | {"options": ["x", "x" if n < bad else "y"], "meta": {"duration_s": 5.0}}
        for n in range(count)
    ]
    frame = question_frame([Row(n, row) for n, row in enumerate(data, 1)], {"v.mp4": VideoFacts(5.0)})
    frame["split_check"] = ["also in rl" if shared else "ok"] * count
    return frame


@pytest.mark.parametrize(
    ("bad", "shared", "overlap_stops", "stopping"),
    [
        (0, False, True, set()),
        (1, False, True, set()),  # 1 of 40: named, and no reason to stop
        (4, False, True, {"each answer fits its type and options, in 95% of the rows"}),
        (0, True, True, {"no video is in a training table"}),
        (0, True, False, set()),
    ],
)
def test_a_benchmark_may_have_a_few_rows_out_of_order_and_no_overlap(bad, shared, overlap_stops, stopping):
    found = judged("mlvu", benchmark_suite(overlap_stops), benchmark(40, bad, shared))
    assert {outcome.says for outcome in found if outcome.stops} == stopping
    warned = [outcome for outcome in found if outcome.severity == "warning" and outcome.status == "failed"]
    assert bool(warned) == bool(bad or (shared and not overlap_stops))
    assert all(outcome.rows for outcome in warned)


def test_files_are_judged_once_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(tmp_path / "root"))
    store = MediaStore(tmp_path / "root")
    write_clip(tmp_path / "good.mp4", 60, 30)
    write_truncated(tmp_path / "cut.mp4")
    (tmp_path / "empty.mp4").write_bytes(b"")
    files = {}
    for name in ("good.mp4", "cut.mp4", "empty.mp4"):
        for path in (name, f"again/{name}"):
            aside = store.scratch()
            shutil.copyfile(tmp_path / name, aside)
            sha256 = sha256_of(aside)
            store.adopt(aside, sha256)
            store.show("o/n", path, sha256)
            files[media_path("o/n", path)] = sha256
    facts = learn_facts(store, files, None, 60.0, 2)
    assert facts["data/media/o__n/good.mp4"] == facts["data/media/o__n/again/good.mp4"]
    assert facts["data/media/o__n/good.mp4"].duration_s == pytest.approx(2.0)
    assert facts["data/media/o__n/cut.mp4"].problem.startswith("truncated: ")
    assert facts["data/media/o__n/empty.mp4"].problem.startswith("empty: ")
    opened: list[str] = []

    def watched(path: Path, timeout_s: float) -> VideoFacts:
        opened.append(Path(path).name)
        return examine(path, timeout_s)

    monkeypatch.setattr("paravt.data.facts.examine", watched)
    assert learn_facts(store, files, None, 60.0, 2) == facts and not opened
    monkeypatch.setattr("paravt.data.facts.reader_version", lambda: "another")
    assert learn_facts(store, files, None, 60.0, 2) == facts and len(opened) == 3
    assert resolve_media(store.root, "o/n", "good.mp4").is_file()


def test_beyond_the_sample_the_containers_word_is_taken(tmp_path, monkeypatch):
    clip = write_clip(tmp_path / "good.mp4", 60, 30)
    assert declared(clip).duration_s == pytest.approx(examine(clip, 60.0).duration_s, abs=0.1)
    (tmp_path / "text.mp4").write_text("no video")
    assert declared(tmp_path / "text.mp4").problem == "undecodable: text.mp4"
    opened = []
    monkeypatch.setattr(
        "paravt.data.facts.examine", lambda path, timeout_s: opened.append(path) or VideoFacts(1.0)
    )
    files = {str(write_clip(tmp_path / f"{n}.mp4", 10 + n)): f"{n:064x}" for n in range(6)}
    facts = learn_facts(MediaStore(tmp_path / "root"), files, 2, 60.0, 2)
    assert len(opened) == 2 and len(facts) == 6
    assert sum(fact.duration_s == 1.0 for fact in facts.values()) == 2


def test_a_question_exists_if_its_video_is_in_the_manifest(tmp_path, monkeypatch):
    """Whatever else of its repository lies in this machine's media root."""
    place = place_in(tmp_path)
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(place.media))
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"frames")
    rows = write_split(place, "charades", 6, clip)
    brought = [
        MediaFile(SOURCES["charades"].repository, "c", f"Charades_v1_480/{name}", 6, "1" * 64)
        for name in {row["video"] for row in rows[:4]}
    ]
    write_manifest(place.tables / "manifest.jsonl", brought)
    hub = check(compose(["scale=paravt_mini"])).data.hub.model_copy(update={"benchmarks": ["charades"]})
    found, set_aside = load_benchmarks(hub, place.tables)
    assert len(found["charades"]) == 4 and set_aside == {"charades": 2}
    assert {row.data["video"] for row in found["charades"]} == {
        media_path(file.repository, file.path) for file in brought
    }


@pytest.fixture
def asked(tmp_path):
    """Windows of a clip, params, and a file of reports that is not there yet."""
    clip = str(write_clip(tmp_path / "clip.mp4", 90, 30))
    params = check(compose(["scale=paravt_mini"])).model_copy(update={"visual": VISUAL})
    return [(clip, 0.0, 1.0), (clip, 1.0, 2.0), (clip, 2.0, 3.0)], params, tmp_path / "reports.jsonl"


def test_reports_of_another_model_or_of_other_frames_are_asked_for_again(asked):
    windows, params, target = asked
    encoder = tiny_encoder()

    def write(words: str, model: str, params=params):
        engine = ScriptedEngine(encoder, lambda prompt: words)
        return write_reports(windows, engine, encoder, params, model, target)

    assert write("a cup", "one").written == 3 and write("a cup", "one").written == 0
    assert set(model_reports(target, asked_of(params)).values()) == {"a cup"}
    assert write("a key", "two").written == 3
    with pytest.raises(ValueError, match="holds reports of the models one, two; keep the lines of one"):
        model_reports(target, asked_of(params))
    few = params.model_copy(update={"visual": VISUAL.model_copy(update={"crop_max_frames": 2})})
    with pytest.raises(ValueError, match=r"no report with these frames .* run `python -m stages.reports"):
        model_reports(target, asked_of(few))
    assert write("a map", "two", few).written == 3
    assert set(model_reports(target, asked_of(few)).values()) == {"a map"}


def test_torn_lines_and_empty_reports_are_counted(asked):
    windows, params, target = asked
    encoder = tiny_encoder()
    engine = ScriptedEngine(encoder, lambda prompt: "a cup é" if "0.0 to 1.0" in prompt.text else " ")
    first = write_reports(windows, engine, encoder, params, "one", target)
    assert (first.written, first.empty, first.torn) == (1, 2, 0)
    content = target.read_bytes()
    target.write_bytes(content + content.replace(b"0.0", b"1.0")[:-5])  # killed while it wrote
    assert "a cup é" in model_reports(target, asked_of(params)).values()
    engine = ScriptedEngine(encoder, lambda prompt: "a key")
    again = write_reports(windows, engine, encoder, params, "one", target)
    assert (again.written, again.empty, again.torn) == (2, 0, 1)
    assert sorted(model_reports(target, asked_of(params)).values()) == ["a cup é", "a key", "a key"]


def test_a_person_is_told_of_licences_and_what_is_missing():
    report = {
        "repositories": {
            "a/free": {"licence": "apache-2.0"},
            "a/bound": {"licence": "cc-by-nc-sa-4.0"},
        },
        "buckets": {
            "selfqa": {"named": 5, "missing": 0, "examples": []},
            "museg/charades": {"named": 9, "missing": 2, "examples": ["museg/charades/a.mp4"]},
        },
        "benchmarks": {"mlvu": {"missing": 1, "examples": ["x.mp4"]}},
        "broken": {"a/free": {"b.zip": "a/free: b.zip cannot be read as an archive"}},
    }
    assert notes(report) == [
        "a/bound is under licence cc-by-nc-sa-4.0; check that your use fits it",
        "2 of 9 media of bucket museg/charades are missing, first museg/charades/a.mp4",
        "1 media of benchmark mlvu are missing, first x.mp4",
        "a/free: b.zip cannot be read as an archive",
    ]


def test_a_stage_asks_for_the_media_that_it_uses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(supply, "ensure", asked.append)
    supply.bring("sft")
    assert asked == []  # nothing published is in use
    training = MediaFile("ParaVT/ParaVT-Source", "c", "selfqa/a.mp4", 1, "1" * 64, "a.zip")
    split = MediaFile("yale-nlp/MMVU", "c", "videos/Art/0.mp4", 1, "2" * 64)
    base = MediaFile("q/base", "c", "model.safetensors", 1, "3" * 64, kind="model")
    other = MediaFile("q/other", "c", "model.safetensors", 1, "4" * 64, kind="model")
    for path, files in {
        "data/hub/manifest.jsonl": [training, split, base, other],
        "data/prepared/media.jsonl": [training],
    }.items():
        Path(path).parent.mkdir(parents=True)
        write_manifest(path, files)
    Path("models/base").mkdir(parents=True)
    write_reference(Path("models/base"), [base])
    for stage, files in {
        "sft": {training, base},
        "para_grpo": {training, base},
        "evaluate": {split, base},
    }.items():
        supply.bring(stage)
        assert set(asked.pop()) == files
