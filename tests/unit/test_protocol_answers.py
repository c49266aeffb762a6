"""What an answer says: choices, spans, open text."""

from __future__ import annotations

from itertools import permutations

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from paravt.protocol import read_choice, read_open, read_span

FAST = settings(max_examples=150, deadline=None)
SHAPES = ("circle", "square", "triangle", "cross")

# --- choices


@pytest.mark.parametrize(
    "text",
    ["B", "b", "(B)", "(b)", "[B]", "B.", "B)", "**B**", "'B'", "B: square", "B. square"]
    + ["B) Square.", "b. square"]
    + ["(B) square", "B square", "B - square", "square", "Square.", '"square"']
    + ["The answer is B.", "Answer: B"]
    + ["the answer is b", "option b", "So the correct answer is square.", "It is B", "I think B"]
    + ["B\nbecause it is"]
    + ["B, not A", "A man in room B", "The answer is (B), the second.", "B is right", "B B"],
)
def test_choice_b(text):
    assert read_choice(text, SHAPES) == "B"


@pytest.mark.parametrize(
    "text",
    ["", " ", "the", "...", "A man walks", "A circle of light", "I saw it", "E", "E or B", "AB"]
    + ["B-roll", "no idea"]
    + ["A and B", "A or B", "A, B, C, D", "A B C D", "A/B/C/D", "A-D", "(A) (B)", "(a) or (b)", "not A"]
    + ["neither A nor B", "circle, square", "circle square triangle cross"]
    + ["A. circle B. square C. triangle"]
    + ["B. circle", "(B) triangle", "C square", "It is square or so", "squares", "Bsquare", "1"]
    + ["Is it A? Or B?"],
)
def test_no_single_choice(text):
    assert read_choice(text, SHAPES) is None


def test_letter_a_and_the_article():
    for text in (
        "A",
        "A.",
        "(A)",
        "A. circle",
        "It's A.",
        "A is correct",
        "The answer is A because it is round",
    ):
        assert read_choice(text, SHAPES) == "A"
    assert read_choice("A dog", ("a dog", "a cat")) == "A"
    assert read_choice("A cat", ("a dog", "a cat")) == "B"
    assert read_choice("A square", SHAPES) is None  # letter A beside another option's text, or an article


def test_letter_i_and_the_pronoun():
    ten = tuple(f"shape {i}" for i in range(10))
    assert read_choice("I", ten) == "I" and read_choice("The answer is I.", ten) == "I"
    assert read_choice("I think it is C", ten) == "C"
    assert read_choice("I cannot tell", ten) is None


def test_without_options_the_letters_a_to_j_are_on_offer():
    assert read_choice("J") == "J" and read_choice("K") is None and read_choice("(E) none") == "E"
    assert read_choice("E", SHAPES) is None


def test_option_texts_with_letters_numbers_and_repeats():
    vitamins = ("Vitamin A", "Vitamin C")
    assert read_choice("Vitamin C", vitamins) == "B" and read_choice("B. Vitamin C", vitamins) == "B"
    assert read_choice("A. Vitamin C", vitamins) is None
    assert read_choice("2", ("1", "2", "12")) == "B" and read_choice("-3", ("3", "-3")) == "B"
    assert read_choice(".5", ("5", ".5")) == "B" and read_choice("0.5", ("5", "0.5")) == "B"
    assert read_choice("cat", ("cat", "cat")) is None
    assert read_choice("B", ("B", "A")) == "B"  # a bare letter is a letter
    assert read_choice("A. B", ("B", "A")) == "A" and read_choice("(A) (B)", ("B", "A")) is None
    assert read_choice("A B", ("B", "A")) is None and read_choice("A", ("A", "B")) == "A"
    assert read_choice("square", ("A. circle", "B. square")) == "B"
    assert read_choice("not red", ("red", "not red")) == "B"


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "form", ["{} ", "{}, ", "({}) ", "{}. ", "{}\n", "option {}; ", "answer is {}. ", "{} or "]
)
def test_every_option_listed_is_no_choice(form, count):
    for letters in permutations("ABCD"[:count]):
        assert read_choice("".join(form.format(letter) for letter in letters).strip(), SHAPES) is None


@FAST
@given(st.text(max_size=40), st.lists(st.text(max_size=6), max_size=12))
@example("A", [])
@example("\ud800", ["\ud800", "b"])
def test_choice_takes_any_text(text, options):
    choice = read_choice(text, options)
    assert choice is None or choice in "ABCDEFGHIJ"[: len(options) or 10]
    assert choice is None or read_choice(choice, options) == choice


# --- spans


@pytest.mark.parametrize(
    "text",
    ["12.5 to 17.8", "12.5-17.8", "12.5 - 17.8", "12.5–17.8", "12.5s-17.8s", "12.5 s to 17.8 s."]
    + ["[12.5, 17.8]"]
    + ["(12.5, 17.8)", "12.5, 17.8", "12.5 17.8", "<12.5 seconds> to <17.8 seconds>"]
    + ["from 12.5 to 17.8 seconds"]
    + ["start: 12.5 end: 17.8", "start_time=12.5, end_time=17.8", '{"start": 12.5, "end": 17.8}']
    + ["12.5 and 17.8"]
    + ["It starts at 12.5 s and ends at 17.8 s.", "The event is shown between 12.5 and 17.8."]
    + ["12.5 --> 17.8"]
    + ["In scene 2 the shape shows from 12.5 to 17.8 seconds.", "0:12.5 to 0:17.8"]
    + ["00:00:12.5 - 00:00:17.8"]
    + ["12.5 to 17.8, that is 0:12 to 0:18", "- 12.5 to 17.8", "１２.5 to 17.8"]
    + ["12.5 SECONDS TO 17.8 SECONDS"],
)
def test_span(text):
    assert read_span(text) == (12.5, 17.8)


def test_minutes():
    for text in (
        "from 1:30 to 1:45",
        "1:30-1:45",
        "00:01:30 to 00:01:45",
        "1 min 30 s to 1 min 45 s",
        "1 minute 30 to 1 minute 45",
        "90 to 105",
    ):
        assert read_span(text) == (90.0, 105.0)
    assert read_span("2 minutes to 3 minutes") == (120.0, 180.0)
    assert read_span("between 2 minutes and 3 minutes") == (120.0, 180.0)
    assert read_span("5 to 5") == (5.0, 5.0)


@pytest.mark.parametrize(
    "text",
    ["12,5 to 17,8", "12 to 17,8", "12,5 to 17", "1,200 to 1,300 s", "start: 12,5 end: 17,8"]
    + ["", "12.5", "never", "-3 to 7", "from -3 to 7", "3 to -7", "answer:-3 to 7", "−3 to 7"]
    + ["[-3, 7]", "start: -3 end: 7"]
    + ["7 to 3", "[7, 3]", "start: 7 end: 3", "3 to 7 or 10 to 20", "0 to 5, 5 to 10, 10 to 15"]
    + ["nan to inf"]
    + ["1.5 minutes to 2 minutes", "1 h to 2 h", "2024-05-06", "3 to 7th"]
    + ["9" * 400 + " to " + "9" * 401],
)
def test_no_span(text):
    assert read_span(text) is None


@FAST
@given(st.floats(0, 9999).map(lambda x: round(x, 1)), st.floats(0, 9999).map(lambda x: round(x, 1)))
def test_span_reads_what_was_written(first, second):
    start, end = sorted((first, second))
    for form in ("{} to {}", "{}-{}", "[{}, {}]", "From {} s to {} s.", "start: {} end: {}"):
        assert read_span(form.format(start, end)) == (start, end)
        assert start == end or read_span(form.format(end, start)) is None


@FAST
@given(st.text(alphabet="0123456789.:-,[] to\u0663\u00b2sminad\n", max_size=40) | st.text(max_size=40))
def test_span_takes_any_text(text):
    span = read_span(text)
    assert span is None or 0 <= span[0] <= span[1] < float("inf")


# --- open text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The Cat.", "cat"),
        ("a red  Square!", "red square"),
        ("-3.5", "-3.5"),
        ("+3", "3"),
        ("35", "35"),
        (".5", ".5"),
        ("1,000 m", "1000 m"),
        ("x = −3", "x -3"),
        ("3-5", "3 5"),
        ("3.5s", "3.5s"),
        ("room 3A", "room 3a"),
        ("a_b", "b"),
        ("don't", "dont"),
        ("well-known", "well known"),
        ("A", "a"),
        ("the", "the"),
        ("...", ""),
        (None, ""),
    ],
)
def test_open_text(text, expected):
    assert read_open(text) == expected


@FAST
@given(st.text(max_size=40) | st.text(alphabet="+-.,0123456789 athe_'", max_size=20))
def test_open_text_takes_any_text_and_is_idempotent(text):
    once = read_open(text)
    assert read_open(once) == once
