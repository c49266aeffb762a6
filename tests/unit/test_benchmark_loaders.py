"""The seven published splits: what a row becomes, and what is made of the rows that are no question."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.benchmarks import PUBLISHED, Place, get, names
from paravt.benchmarks.registry import estimate_tokens
from paravt.benchmarks.runner import video_fingerprint
from paravt.benchmarks.subtitles import Line, read_srt, shown
from paravt.benchmarks.tables import letter_of, split_options
from paravt.data.media import resolve_media
from paravt.data.published import SOURCES
from paravt.protocol import question_text
from tests.benchmark_tables import (
    MAKERS,
    SRT,
    charades_row,
    longvideobench_row,
    lvbench_row,
    mlvu_row,
    mmvu_row,
    place_in,
    videomme_row,
    write_media,
    write_split,
    write_table,
)


@pytest.fixture
def place(tmp_path) -> Place:
    return place_in(tmp_path)


@pytest.fixture
def clip(tmp_path) -> Path:
    """Loaders look for files and do not open them."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"frames")
    return path


def loaded(place: Place, name: str, rows: list[dict]):
    write_table(place, name.removesuffix("_wsub"), rows)
    return get(name).load(place)


def test_all_splits_are_known():
    assert set(PUBLISHED) | {"needles"} <= set(names())
    assert set(MAKERS) == set(SOURCES) == {name for name in PUBLISHED if name != "videomme_wsub"}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_each_row_is_one_question_with_a_file_and_a_unique_id(name, place, clip):
    write_split(place, name, 12, clip)
    found = get(name).load(place)
    assert found.rows == 12 and len(found.samples) == 12 and not found.set_aside
    assert len({sample.id for sample in found.samples}) == 12
    for sample in found.samples:
        assert get(name).skip(sample) is None
        Path(sample.video).unlink()
        assert "is not on this machine" in get(name).skip(sample)
        write_media(place, name, str(Path(sample.video).relative_to(resolve_media(
            place.media, SOURCES[name].repository, "x").parent)), clip)  # fmt: skip
        assert set(get(name).by) <= set(sample.meta)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_missing_table_says_what_to_run(name, place):
    with pytest.raises(FileNotFoundError, match=f"paravt eval fetch --benchmarks {name}"):
        get(name).load(place)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_another_layout_and_an_empty_table_are_refused(name, place):
    rows = [{"other": 1}] if name == "mmvu" else [{"other": 1, "timestamp": [0, 1]}]
    with pytest.raises(ValueError, match="not the published one"):
        loaded(place, name, rows)
    if name == "mmvu":
        with pytest.raises(ValueError, match="holds no rows"):
            loaded(place, name, [])


# --- options are lettered once, and gold letters stay


def test_videomme_options_are_lettered_once(place):
    [sample] = loaded(place, "videomme", [videomme_row(1)]).samples
    assert sample.options == ("A cup.", "A key.", "A map.", "A coin.") and sample.answer == "B"
    assert question_text(sample, "direct") == (
        "What does the woman pick up first?\n"
        "A. A cup.\nB. A key.\nC. A map.\nD. A coin.\nAnswer with the letter."
    )
    assert sample.id == "000-2" and sample.meta["duration"] == "short"


def test_videomme_finds_files_of_other_spellings(place, clip):
    write_media(place, "videomme", "data/vid0.MP4", clip)
    write_media(place, "videomme", "more/vid1.mkv", clip)
    found = loaded(place, "videomme", [videomme_row(0), videomme_row(3), videomme_row(6)])
    videos = [Path(sample.video).name for sample in found.samples]
    assert videos == ["vid0.MP4", "vid1.mkv", "vid2.mp4"]
    assert [get("videomme").skip(sample) is None for sample in found.samples] == [True, True, False]


def test_longvideobench_keeps_letters(place):
    rows = [
        longvideobench_row(2),
        longvideobench_row(3, option1="N/A", correct_choice=2),
        longvideobench_row(4, correct_choice=3),
        longvideobench_row(5, correct_choice=9),
        longvideobench_row(6, option3=None, option4=None, correct_choice=0),
    ]
    found = loaded(place, "longvideobench", rows)
    first, second, third = found.samples
    assert first.options == ("a lamp", "a cup", "a book") and first.answer == "C"
    assert second.options == ("a lamp", "N/A", "a book") and second.answer == "C"
    assert third.options == ("a lamp", "a cup", "a book") and third.answer == "A"
    assert first.meta == {"duration": "600 s", "task": "S2O"}
    assert list(found.set_aside) == ["lv4_0 (row 2)", "lv5_0 (row 3)"]
    assert found.set_aside["lv4_0 (row 2)"] == "correct_choice 3 is none of its 3 options"


def test_lvbench_options_are_taken_out_of_the_question(place):
    [sample] = loaded(place, "lvbench", [lvbench_row(2)]).samples
    assert sample.question == "What year is shown?" and sample.options == ("1631", "1632", "1633", "1634")
    assert sample.answer == "C" and sample.id == "1202"
    assert question_text(sample, "direct").count("1631") == 1
    assert "00:15" not in str(sample.to_json()), "time_reference tells where the answer is"
    [bad] = loaded(place, "lvbench", [lvbench_row(0), lvbench_row(1, question="What?")]).set_aside.values()
    assert bad == "its question holds no options (A), (B), ..."


def test_mlvu_takes_letters_and_texts_and_prints_options_once(place):
    rows = [
        mlvu_row(1),
        mlvu_row(2, answer="blue"),
        mlvu_row(3, answer="green"),
        mlvu_row(4, task_type="findNeedle", question_id="Q1"),
        mlvu_row(5, candidates=["1", "2", "3", "4"], question="How many?", answer="2"),
        mlvu_row(6, answer="E"),
    ]
    found = loaded(place, "mlvu", rows)
    assert [(s.id, s.answer) for s in found.samples] == [("Q1", "B"), ("Q2", "B"), ("Q1#2", "A"), ("Q5", "B")]
    assert found.samples[0].question == "What colour is the car?" == found.samples[1].question
    assert found.samples[2].meta == {"task": "needle"}
    assert list(found.set_aside.values()) == [
        "the gold answer 'green' is none of its 4 options",
        "the gold answer 'E' is none of its 4 options",
    ]
    assert question_text(found.samples[0], "direct").count("white") == 1


def test_mmvu_open_questions_are_open_or_left_out(tmp_path):
    rows = [mmvu_row(number) for number in range(4)]
    rows[3] = mmvu_row(3, choices={"A": "Ohm", "B": "Hooke", "C": "", "D": "", "E": ""}, answer="B")
    found = loaded(place_in(tmp_path), "mmvu", rows)
    assert [sample.question_type for sample in found.samples] == ["mcq", "mcq", "oe", "mcq"]
    assert found.samples[2].answer == "surface tension" and found.samples[2].options == ()
    assert found.samples[3].options == ("Ohm", "Hooke")
    assert found.samples[0].meta == {"type": "choice", "subject": "Art"}
    assert found.samples[0].video.endswith("yale-nlp__MMVU/videos/Art/0.mp4")
    left = loaded(place_in(tmp_path, open_ended="leave_out"), "mmvu", rows)
    assert [sample.id for sample in left.samples] == ["validation_0", "validation_1", "validation_3"]
    assert left.set_aside == {
        "validation_2 (row 2)": "an open question, left out by the option open_ended"
    } and left.rows == 4  # fmt: skip


def test_charades_times_are_those_that_were_annotated(place):
    found = loaded(
        place,
        "charades",
        [
            charades_row(0),
            charades_row(1),
            charades_row(2, timestamp=[7.0, 7.0]),
            charades_row(3, caption=" "),
        ],
    )
    assert [sample.id for sample in found.samples] == ["AB120", "AB120#2"]
    assert found.samples[0].answer == (24.3, 30.4)
    assert question_text(found.samples[0], "direct") == (
        'When does this happen in the video: "a person opens a window."\n'
        "Answer with the times in seconds, as: start to end."
    )
    assert list(found.set_aside.values()) == [
        "its span 7.0 to 7.0 s is empty or inverted",
        "its caption is empty",
    ]


def test_with_the_usual_media_root_a_video_has_the_same_name_everywhere(tmp_path, clip, monkeypatch):
    for root in ("here", "there"):
        monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(tmp_path / root))
        place = Place(tables=tmp_path / "hub", media=tmp_path / root)
        write_split(place, "lvbench", 2, clip)
        found = get("lvbench").load(place).samples
        assert [sample.video for sample in found] == ["data/media/lmms-lab__LVBench/lb0.mp4"] * 2
        assert get("lvbench").skip(found[0]) is None
        assert video_fingerprint(found[0].video) != "missing"


def test_a_path_that_leaves_the_media_root_is_no_question(place):
    found = loaded(place, "charades", [charades_row(0), charades_row(1, video="../../etc/passwd.mp4")])
    assert len(found.samples) == 1 and "cannot be used" in next(iter(found.set_aside.values()))


# --- helpers


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Q?\n(A) x\n(B) y", ("Q?", ("x", "y"))),
        ("Q?\nA. x\nB. y\nC. z w", ("Q?", ("x", "y", "z w"))),
        ("Q?\n A) x\n B) y\n", ("Q?", ("x", "y"))),
        ("Q (A) or (B)?\n(A) x\n(B) y\nand more", ("Q (A) or (B)?", ("x", "y and more"))),
        ("Which of\n(A) old\n(B) older\nis it?\n(A) x\n(B) y",
         ("Which of\n(A) old\n(B) older\nis it?", ("x", "y"))),
        ("Q?", None), ("Q?\n(A) x", None), ("Q?\n(A) x\n(C) y", None), ("(A) x\n(B) y", None),
        ("Q?\n(A)\n(B) y", None),
    ],
)  # fmt: skip
def test_options_in_a_question(text, expected):
    assert split_options(text) == expected


def test_gold_answers_in_each_form():
    options = ("red", "blue")
    for answer in ("B", "(B)", "B.", "blue", " Blue "):
        assert letter_of(answer, options) == "B"
    assert letter_of("2", ("1", "2")) == "B" and letter_of("B", ("C", "B")) == "B"
    for answer in ("C", "green", "", "AB"):
        with pytest.raises(ValueError, match="none of its 2 options"):
            letter_of(answer, options)


# --- subtitles


def test_subtitles_are_in_order_of_time_without_markup_or_repeats():
    assert read_srt(SRT) == [Line(0.2, 1.0, "first in time"), Line(1.0, 4.0, "Two & two")]
    assert read_srt(SRT.replace("\n", "\r\n").replace(",", ".")) == read_srt(SRT)
    assert read_srt("") == [] and read_srt("no cue") == []
    assert read_srt("00:00:05,000 --> 00:00:04,000\nbackwards") == []
    assert read_srt("1\n00:00:01,0 --> 00:00:02,0\n1984\n\n2\n00:00:03,0 --> 00:00:04,0\n2") == [
        Line(1.0, 2.0, "1984"), Line(3.0, 4.0, "2"),
    ]  # fmt: skip


def test_subtitles_that_are_too_long_are_taken_evenly():
    lines = [Line(float(i), i + 1.0, f"line {i}") for i in range(100)]
    text, count = shown(lines, 10_000, estimate_tokens)
    assert count == 100 and text.startswith("Subtitles:\n0.0-1.0 s: line 0\n")
    text, count = shown(lines, 200, estimate_tokens)
    assert 10 < count < 100 and estimate_tokens(text) <= 200
    assert text.startswith(f"Subtitles ({count} of 100 lines, evenly over the video):\n")
    starts = [float(row.partition("-")[0]) for row in text.splitlines()[1:]]
    assert len(starts) == count and starts[0] < 100 / count and starts[-1] > 100 - 100 / count
    assert max(b - a for a, b in zip(starts, starts[1:], strict=False)) <= 100 / count + 1
    assert shown(lines, 5, estimate_tokens) == ("", 0) == shown([], 5, estimate_tokens)


def test_videomme_with_subtitles(place, tmp_path):
    file = tmp_path / "a.srt"
    file.write_text(SRT, encoding="utf-8")
    write_media(place, "videomme", "subtitle/vid0.srt", file)
    rows = [videomme_row(0), videomme_row(3)]
    found = loaded(place, "videomme_wsub", rows)
    said = "Subtitles:\n0.2-1.0 s: first in time\n1.0-4.0 s: Two & two\n\nWhat does the woman pick up first?"
    assert found.samples[0].question == said and found.samples[0].meta["subtitles"] == "all"
    assert found.samples[1].question == "What does the woman pick up first?"
    assert found.samples[1].meta["subtitles"] == "none"
    short = place_in(tmp_path, subtitle_tokens=1, count_tokens=lambda text: text.count(" s: "))
    found = get("videomme_wsub").load(short)
    assert found.samples[0].meta["subtitles"] == "part" and "(1 of 2 lines" in found.samples[0].question


FAST = settings(max_examples=200, deadline=None)


@FAST
@given(st.lists(st.sampled_from(["1", "\n", "00:00:01,5", " --> ", "00:99:01.2", "<b>", "word", "\r", "９"])))
def test_any_text_is_read_as_subtitles(parts):
    lines = read_srt("".join(parts))
    assert all(0 <= line.start_s <= line.end_s and line.text for line in lines)
    assert lines == sorted(lines, key=lambda line: (line.start_s, line.end_s))
