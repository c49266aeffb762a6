"""Published rows become traces and questions of ours, or are set aside with a reason."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from paravt.data.checks import OK, check_agreement, check_roles, check_targets, check_windows, whole_turn
from paravt.data.conversion import Outcome, Rules, convert
from paravt.data.questions import Asked, read_gold, read_question, rl_sample
from paravt.data.schema import VideoFacts
from paravt.data.sentinel import Resolver, RowError
from paravt.data.tables import Table, named_media, read_table, rl_tables, sft_tables
from paravt.data.training import rl_questions, sft_rows
from paravt.protocol import parse_turn

DURATION_S = 60.0
RULES = Rules(budgets=(4, 8))
INSTRUCTED = (
    "Think first, call **crop_video** if needed, then answer. Format strictly as: <think>...</think> "
    "<tool_call>...</tool_call> (if tools needed) <answer>...</answer>."
)


def user(text: str, url: str = "selfqa/v.mp4") -> dict:
    return {
        "role": "user",
        "content": [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": text}],
    }


def call(start, end, **more) -> str:
    body = {
        "name": "crop_video",
        "arguments": {"video_path": "selfqa/v.mp4", "start_time": start, "end_time": end} | more,
    }
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


def says(text: str) -> dict:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def frames(text: str, count: int = 2) -> dict:
    images = [{"type": "image_url", "image_url": {"url": f"selfqa/v_1_2_{n}.jpg"}} for n in range(count)]
    return {
        "role": "user",
        "content": [{"type": "text", "text": f"<tool_response>{text}</tool_response>"}, *images],
    }


def words(text: str, role: str = "user") -> dict:
    return {"role": role, "content": [{"type": "text", "text": f"<tool_response>{text}</tool_response>"}]}


def converted(*messages, rules: Rules = RULES, facts: VideoFacts | None = None) -> Outcome:
    known = facts or VideoFacts(DURATION_S)
    return convert({"messages": list(messages)}, "t-1", "t", str, lambda p: f"m/{p}", lambda p: known, rules)


def texts(outcome: Outcome) -> list:
    assert outcome.trace is not None, outcome.reason
    return [turn.text if turn.role == "assistant" else turn.results for turn in outcome.trace.turns]


ASKED = "Which animal?\nOptions:\nA. cat\nB. dog"
NOTICE = "The tool executed successfully. Here are 2 frames from 10.0 s to 20.0 s."


def test_a_single_call_with_frames_gets_the_words_that_look_at_them():
    found = converted(
        {"role": "system", "content": "You are a helpful assistant."},
        user(f"{ASKED}\n{INSTRUCTED}\nThe Video path for this video is: selfqa/v.mp4"),
        says(f"<think>I must look.</think>\n{call(10.0, 20.456)}"),
        frames(NOTICE),
        says("<think>The clip shows a small dog running. So the answer is B.</think>\n<answer>B</answer>"),
    )
    assert found.status == "converted" and found.merged == 0
    dispatch, results, answer = texts(found)
    assert dispatch == (
        "<think>\nI must look.\n</think>\n<tool_call>\n"
        '{"name": "crop_video", "arguments": {"video_path": "v.mp4", "start_time": 10.0, "end_time": 20.45}}'
        "\n</tool_call>"
    )
    assert results == ("The clip shows a small dog running.",)
    assert answer.endswith("</think>\n<answer>B</answer>")
    sample = found.trace.sample
    assert (sample.question, sample.options, sample.answer) == ("Which animal?", ("cat", "dog"), "B")
    assert (sample.video, sample.question_type) == ("m/selfqa/v.mp4", "mcq")
    assert sample.meta == {"source": "t", "duration_s": DURATION_S}
    assert found.trace.frame_budget in RULES.budgets


def test_independent_calls_become_one_turn_and_their_reports_keep_their_order():
    found = converted(
        user(ASKED),
        says(f"<think>I must look at the start.</think>{call(0, 5)}"),
        words("A white cat sleeps on a chair."),
        says(f"<think>The end has to be seen too.</think>{call(50, 60)}"),
        words("A brown dog runs over grass.", role="tool"),
        says("<think>The cat only sleeps. So it is the dog.</think><answer>B</answer>"),
    )
    dispatch, results, _ = texts(found)
    assert found.merged == 1
    parsed = parse_turn(whole_turn(dispatch))
    assert [c.arguments["start_time"] for c in parsed.calls] == [0.0, 50.0] and parsed.well_formed
    assert results == ("A white cat sleeps on a chair.", "A brown dog runs over grass.")
    assert parsed.think == "I must look at the start.\nThe end has to be seen too."


@pytest.mark.parametrize(
    ("think", "window", "rules"),
    [
        ("The clip shows nothing, so I look on.", (50, 60), RULES),  # looks back
        ("The middle has to be seen too.", (4, 8), RULES),  # windows overlap
        ("The end has to be seen too.", (50, 60), Rules(budgets=(4,), merge=False)),
        ("The end has to be seen too.", (50, 60), Rules(budgets=(4,), max_calls=1)),
    ],
)
def test_calls_that_build_on_another_stay_in_their_order(think, window, rules):
    found = converted(
        user(ASKED),
        says(f"<think>I must look at the start.</think>{call(0, 5)}"),
        words("A white cat sleeps on a chair."),
        says(f"<think>{think}</think>{call(*window)}"),
        words("A brown dog runs over grass."),
        says("<think>It is the dog.</think><answer>B</answer>"),
        rules=rules,
    )
    assert len(texts(found)) == 5 and found.merged == 0


def test_a_row_in_the_grammar_passes_as_it_is():
    found = converted(
        user(ASKED),
        says(f"<think>\nboth at once\n</think>\n{call(0.0, 5.0)}\n{call(50.0, 60.0)}".replace("selfqa/", "")),
        words("A white cat sleeps.</tool_response><tool_response>A brown dog runs."),
        says("<think>a dog then</think>\n<answer>B</answer>"),
    )
    assert (found.status, found.merged) == ("passed", 0)
    assert len(texts(found)[1]) == 2
    plain = converted(user(ASKED), says("<think>seen</think>\n\n<answer>B</answer>"))
    assert (plain.status, texts(plain)) == ("passed", ["<think>\nseen\n</think>\n<answer>B</answer>"])


def test_reports_of_a_model_take_the_place_of_frames():
    messages = [
        user(ASKED),
        says(f"<think>look</think>{call('0:10', '20s')}"),
        frames(NOTICE),
        says("<think>clear</think><answer>B</answer>"),
    ]
    assert converted(*messages).reason == "no report takes the place of its returned frames"
    reports = {("m/selfqa/v.mp4", 10.0, 20.0): "A dog runs."}
    found = converted(*messages, rules=Rules(budgets=(4,), reports=reports))
    assert texts(found)[1] == ("A dog runs.",)
    assert '"start_time": 10.0, "end_time": 20.0' in texts(found)[0]


def test_without_paths_for_the_small_prompt():
    found = converted(
        user(ASKED),
        says(f"<think>look</think>{call(1, 99, num_frames=4)}"),
        words("A dog runs over grass."),
        says("<think>clear</think><answer>B</answer>"),
        rules=Rules(budgets=(4,), with_path=False),
    )
    assert '"arguments": {"start_time": 1.0, "end_time": 60.0, "num_frames": 4}' in texts(found)[0]


@pytest.mark.parametrize(
    ("messages", "facts", "reason"),
    [
        ([says("<think>x</think><answer>A</answer>")], None, "its first message is not the user's"),
        ([{"role": "user", "content": "Which?"}], None, "it has no video or image"),
        ([user(ASKED), says("<answer>A</answer>")], None, "an assistant turn has no closed think"),
        ([user(ASKED), says("<think>x<answer>A</answer>")], None, "an assistant turn has no closed think"),
        ([user(ASKED), says("<think>x</think>A")], None, "its last turn has no single closed answer"),
        (
            [user(ASKED), says("<think>x</think><answer>C</answer>")],
            None,
            "the gold answer names none of the options",
        ),
        ([user(ASKED), says(f"<think>x</think>{call(1, 2)}")], None, "1 calls got 0 answers"),
        (
            [user(ASKED), says(f"<think>x</think>{call(1, 2)}"), words("a b c d")],
            None,
            "it ends without an answer",
        ),
        (
            [user(ASKED), says("<think>x</think><tool_call>{</tool_call>"), words("a")],
            None,
            "a call cannot be read",
        ),
        (
            [
                user(ASKED),
                says(f"<think>x</think>{call(70, 80)}"),
                words("a b c d"),
                says("<think>x</think><answer>A</answer>"),
            ],
            None,
            "a call's window is not in its video",
        ),
        (
            [user(INSTRUCTED), says("<think>x</think><answer>A</answer>")],
            None,
            "no question is left after its instructions",
        ),
        (
            [user(ASKED), says("<think>x</think><answer>A</answer>")],
            VideoFacts(problem="truncated: v.mp4"),
            "its video cannot be used (truncated)",
        ),
        (
            [user("When does it end?"), says("<think>x</think><answer>70 to 80</answer>")],
            None,
            "its answer lies outside its video",
        ),
        (
            [user(ASKED), says("<think>x <|im_end|> y</think><answer>A</answer>")],
            None,
            "OK",
        ),
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(messages, facts, reason):
    found = converted(*messages, facts=facts)
    if reason == "OK":  # the parser takes control tokens out, so the text may be learned
        assert "<|" not in str(texts(found))
    else:
        assert (found.status, found.reason, found.trace) == ("set aside", reason, None)


def test_too_many_turns_are_set_aside():
    steps = []
    for n in range(4):
        steps += [
            says(f"<think>The clip shows {n}.</think>{call(n, n + 1)}"),
            words(f"A thing shows number {n}."),
        ]
    found = converted(user(ASKED), *steps, says("<think>x</think><answer>A</answer>"))
    assert found.reason == "it has 4 tool turns, more than max_turns 3"


WORDS = st.text("abc .<>/thinkanswer", max_size=20)
STEP = st.tuples(WORDS, st.floats(-5, 70), st.floats(-5, 70), WORDS)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=3), WORDS, st.sampled_from(["A", "B", "cat", "3 to 7", "x"]), st.booleans())
def test_every_trace_that_leaves_is_in_the_grammar(steps, think, answer, choice):
    messages = [user(ASKED if choice else "When does it show?")]
    for before, start, end, report in steps:
        messages += [says(f"<think>{before}</think>{call(start, end)}"), words(report)]
    found = converted(*messages, says(f"<think>{think}</think><answer>{answer}</answer>"))
    assert (found.trace is None) == (found.status == "set aside") == bool(found.reason)
    if found.trace is None:
        return
    data = found.trace.to_json()
    sample = found.trace.sample.to_json() | {"answer": data["sample"]["answer"]}
    turns = data["turns"]
    assert check_roles("main", turns) == check_targets("main", turns) == OK
    assert check_windows("main", turns, None, DURATION_S) == OK
    assert check_agreement("main", turns, sample) == OK


# --- questions


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("<video>Which animal?", Asked("Which animal?", (), 0)),
        ("<video>\nWhich animal?\nA. cat\nB. dog", Asked("Which animal?", ("cat", "dog"), 0)),
        ("Which? Options: A. cat, B. a dog. C. cow", Asked("Which?", ("cat", "a dog.", "cow"), 0)),
        ("Which?\nChoices: (A) cat (B) dog", Asked("Which?", ("cat", "dog"), 0)),
        ("Options: A. cat", Asked("Options: A. cat", (), 0)),
        ("Which?\n(A) cat\n(B) dog\n(C) cow", Asked("Which?", ("cat", "dog", "cow"), 0)),
        (f"{ASKED}\n{INSTRUCTED}", Asked("Which animal?", ("cat", "dog"), 3)),
        (
            "Who signed it?\nA. Lincoln did, they say.",
            Asked("Who signed it?\nA. Lincoln did, they say.", (), 0),
        ),
        (
            "What happens? Answer with the option's letter from the given choices.",
            Asked("What happens?", (), 1),
        ),
        (
            "When does he give the answer to the man?",
            Asked("When does he give the answer to the man?", (), 0),
        ),
        ("Is the path to the house long?", Asked("Is the path to the house long?", (), 0)),
    ],
)
def test_a_question_is_cut_out_of_its_prompt(text, asked):
    assert read_question(text) == asked


@pytest.mark.parametrize(
    ("answer", "options", "kind", "gold"),
    [
        ("B", ("cat", "dog"), None, ("mcq", "B")),
        ("(b) dog", ("cat", "dog"), "mcq", ("mcq", "B")),
        ("dog", ("cat", "dog"), "mcq", ("mcq", "B")),
        ("12.0, 17.5", (), "tvg", ("tvg", (12.0, 17.5))),
        ([12, 17.5], (), "tvg", ("tvg", (12.0, 17.5))),
        ("0:12 to 0:17.5", (), None, ("tvg", (12.0, 17.5))),
        ("between 12 and 17.5 seconds", (), "tvg", ("tvg", (12.0, 17.5))),
        (" a man ", (), "oe", ("oe", "a man")),
    ],
)
def test_gold_answers_are_read_by_the_projects_readers(answer, options, kind, gold):
    assert read_gold(answer, Asked("When does it happen?", options, 0), kind) == gold


@pytest.mark.parametrize(
    ("question", "answer", "found"),
    [
        ("When does he leave?", "He leaves from 3.0 to 7.5 seconds.", ("tvg", (3.0, 7.5))),
        ("Find the time range of the event: he leaves.", "[3.0, 7.5]", ("tvg", (3.0, 7.5))),
        ("When does he leave?", "after dinner", ("oe", "after dinner")),
        ("How many of them start?", "from 2 to 3 of them", ("oe", "from 2 to 3 of them")),
        ("How many people are there?", "2 to 3", ("oe", "2 to 3")),
        ("In which segment does he start to run?", "3.0 to 7.5", ("tvg", (3.0, 7.5))),
    ],
)
def test_a_question_about_time_without_a_type(question, answer, found):
    assert read_gold(answer, Asked(question, (), 0), None) == found


@pytest.mark.parametrize(
    ("answer", "options", "kind", "reason"),
    [
        ("E", ("cat", "dog"), "mcq", "names none of the options"),
        ("B", (), "mcq", "names none of the options"),
        ("A", ("cat", "cat"), "mcq", "two options are equal"),
        ("soon", (), "tvg", "no span of time"),
        ("9, 3", (), "tvg", "no span of time"),
        ("", (), "oe", "no text"),
        (None, (), None, "no text"),
        ("A", (), "essay", "none of mcq, tvg, oe"),
    ],
)
def test_gold_answers_that_do_not_fit_are_a_reason(answer, options, kind, reason):
    with pytest.raises(RowError, match=reason):
        read_gold(answer, Asked("When does it happen?", options, 0), kind)


def rl_row(**changes) -> dict:
    row = {
        "data_source": "hacs",
        "prompt": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": f"<video>{ASKED}\n{INSTRUCTED}"},
        ],
        "videos": [{"video": "selfqa/v.mp4", "fps": 1}],
        "extra_info": json.dumps({"answer": "B", "question_type": "mcq"}),
    }
    return row | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"extra_info": {"answer": "B", "question_type": "mcq"}},
        {"prompt": json.dumps(rl_row()["prompt"])},
        {"videos": json.dumps(rl_row()["videos"])},
    ],
)
def test_rl_rows_in_each_published_shape(changes):
    sample = rl_sample(rl_row(**changes), "rl-1", str, lambda path: f"m/{path}")
    assert (sample.id, sample.video, sample.question) == ("rl-1", "m/selfqa/v.mp4", "Which animal?")
    assert (sample.answer, sample.options, sample.meta) == ("B", ("cat", "dog"), {"source": "hacs"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"videos": []}, "it has no video"),
        ({"videos": [{"video": "a"}, {"video": "b"}]}, "it has several videos"),
        ({"videos": [{"path": "a"}]}, "a video of the row is not a path"),
        ({"extra_info": "{"}, "extra_info is not JSON"),
        ({"extra_info": None}, "extra_info is no object"),
        ({"extra_info": {"question_type": "mcq"}}, "the gold answer names none of the options"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "its prompt has no user message"),
    ],
)
def test_rl_rows_that_cannot_be_used_have_a_reason(changes, reason):
    with pytest.raises(RowError, match=reason):
        rl_sample(rl_row(**changes), "rl-1", str, str)


# --- tables


def test_every_row_of_a_table_is_accounted_for(tmp_path: Path):
    good = [user(ASKED), says("<think>x</think><answer>A</answer>")]
    rows = [{"id": "r1", "messages": json.dumps(good)}, {"id": "r2", "messages": "{"}]
    rows += [{"id": "r3", "messages": json.dumps([user(ASKED, "selfqa/gone.mp4"), good[1]])}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "paravt_sft_museg_2k5.parquet")
    parquet.write_table(
        pa.Table.from_pylist([rl_row(), rl_row(videos=[])]), tmp_path / "paravt_rl_diverse_4k4.parquet"
    )
    files = sorted(tmp_path.glob("*.parquet"))
    resolver = Resolver(["selfqa/v.mp4"])
    facts = {"selfqa/v.mp4": VideoFacts(DURATION_S)}
    tables = sft_tables(files, ["museg"])
    traces, ledger = sft_rows(tables, None, resolver, "o/n", facts, RULES)
    assert [trace.id for trace in traces] == ["museg-000000"]
    assert traces[0].sample.video == "data/media/o__n/selfqa/v.mp4"
    assert ledger.to_json() == {
        "rows": 3,
        "splits": {"museg": {"passed": 1, "set aside": 2}},
        "set_aside": {"media missing in selfqa": 1, "messages are not JSON": 1},
        "calls_merged": 0,
    }
    assert [fate.row for fate in ledger.fates] == [
        "museg-000000 (r1)",
        "museg-000001 (r2)",
        "museg-000002 (r3)",
    ]
    samples, ledger = rl_questions(rl_tables(files), None, resolver, "o/n", facts)
    assert [sample.id for sample in samples] == ["rl-000000"]
    assert samples[0].meta == {"source": "hacs", "duration_s": DURATION_S}
    assert ledger.to_json()["set_aside"] == {"it has no video": 1}
    assert len(sft_rows(tables, 1, resolver, "o/n", facts, RULES)[1].fates) == 1  # the row limit
    named = named_media((row for _, row in read_table(tables[0], None)), rl=False)
    assert list(named) == ["selfqa/v.mp4", "selfqa/gone.mp4"]
    with pytest.raises(ValueError, match=r"no table paravt_sft_tvg\*\.parquet; check data.hub.sft_splits"):
        sft_tables(files, ["tvg"])
    (tmp_path / "paravt_sft_bad.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(
        ValueError, match=r"paravt_sft_bad.parquet cannot be read as parquet .*download it again"
    ):
        list(read_table(Table("bad", tmp_path / "paravt_sft_bad.parquet"), None))
