"""One reader of times and windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import pytest

from paravt.times import TimeError, parse_time, parse_window


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (12.5, 12.5),
        ("90", 90.0),
        ("90s", 90.0),
        (" 12.3 seconds", 12.3),
        ("1:30", 90.0),
        ("1:30.5", 90.5),
        ("00:01:30", 90.0),
        ("2:03:04", 7384.0),
        ("<12.3 seconds>", 12.3),
        (".5", 0.5),
        (0, 0.0),
    ],
)
def test_spellings_of_a_time(value, seconds):
    assert parse_time(value) == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize(
    "value",
    [True, None, "", "soon", "nan", float("nan"), float("inf"), "inf", -1, "-3", "1:75", "1:99:00", [3]]
    + ["5 6", "1e1", 10**400],
)
def test_what_is_not_a_time_says_so_in_words(value):
    with pytest.raises(TimeError, match="not a time|before the start of the video"):
        parse_time(value)


@given(st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.none(), st.booleans()))
def test_any_value_is_a_finite_time_or_a_time_error(value):
    try:
        assert 0 <= parse_time(value) < float("inf")
    except TimeError as error:
        assert str(error)


def test_a_window_inside_is_as_asked():
    window = parse_window("1:00", 75, 100.0)
    assert (window.start_s, window.end_s, window.clamped, window.note) == (60.0, 75.0, False, "")


def test_a_window_partly_outside_is_cut_and_says_so():
    window = parse_window(90, 130, 100.0)
    assert (window.start_s, window.end_s, window.clamped) == (90.0, 100.0, True)
    assert window.note == "The window was cut to 90.0-100.0 seconds: the video lasts 100.0 seconds."
    assert parse_window(-5, 10, 100.0).start_s == 0.0
    rounded = parse_window(90, 100 + 1e-9, 100.0)  # rounding is no cut
    assert rounded.end_s == 100.0 and not rounded.clamped


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        (5, 5, "the window is empty: it starts and ends at 5 seconds"),
        (9, 3, "ends at 3 before it starts at 9 s"),
        (100, 110, "starts at 100 seconds, after the end; the video lasts 100.0 seconds"),
        (-9, -3, "ends at -3 seconds, before the video starts"),
        (float("nan"), 3, "start_time 'nan' is not a time"),
        (3, "later", "end_time 'later' is not a time"),
        (None, 3, "start_time 'None' is not a time"),
    ],
)
def test_a_window_that_cannot_be_looked_at(start, end, words):
    with pytest.raises(TimeError, match=words):
        parse_window(start, end, 100.0)
