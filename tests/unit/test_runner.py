"""Running a benchmark: each question ends in one state, answers are kept, failures are asked again."""

from __future__ import annotations

import json
from pathlib import Path

import av
import grimp
import numpy as np
import pytest

from paravt.benchmarks import Place, get, names, runner
from paravt.benchmarks.registry import Benchmark, register
from paravt.benchmarks.results import Result, ResultStore, read_results, write_results
from paravt.benchmarks.runner import (
    Asking,
    agent_ask,
    code_version,
    folder_hash,
    readable,
    run,
    video_fingerprint,
)
from paravt.benchmarks.summary import accuracy, accuracy_table, behaviour, counts, error_share, reasons
from paravt.config import EpisodeConfig, RewardConfig
from paravt.engines import EngineError
from paravt.reporter import LogReporter
from paravt.rollout import Sample
from stages.figures import compliance
from tests.fakes import Cut, ScriptedEngine
from tests.tiny import VISUAL, tiny_encoder

BENCHMARK = Benchmark("scripted", lambda folder: [])
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("clip") / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(30):
            image = np.full((32, 32, 3), 5 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def question(number: int, video: str, kind: str = "mcq") -> Sample:
    answer = {"mcq": "A", "tvg": (1.0, 3.0), "oe": "a circle"}[kind]
    options = ("circle", "square") if kind == "mcq" else ()
    return Sample(f"q{number}", video, f"Question {number}?", answer, kind, options)


def asking(**changes) -> Asking:
    episode = EpisodeConfig(mode="agentic_minimal", temperature=0.0, max_new_tokens=100)
    fields = {
        "episode": episode,
        "visual": VISUAL,
        "reward": RewardConfig(),
        "seed": 1,
        "weights": "w",
        "code": "c",
    }
    return Asking(**(fields | changes))


def said(text: str) -> str:
    return f"I see.\n</think>\n<answer>{text}</answer>"


class Script:
    """An engine whose main agent answers question N by `replies[N]`, and that counts what it was asked."""

    def __init__(self, replies: dict[int, object]) -> None:
        self.replies = replies
        self.asked: list[int] = []
        self.engine = ScriptedEngine(tiny_encoder(), self._reply)

    def _reply(self, prompt):
        if prompt.is_subagent:
            return "a red circle"
        number = int(prompt.text.partition("Question ")[2].partition("?")[0])
        reply = self.replies[number]
        if isinstance(reply, list):
            return reply[prompt.turn]
        self.asked.append(number)
        if isinstance(reply, Exception) and not isinstance(reply, EngineError):
            raise reply
        return reply

    def run(self, samples, store, setup=None, budget=4, benchmark=BENCHMARK, chunk=64):
        setup = setup or asking()
        ask = agent_ask(self.engine, tiny_encoder(), setup)
        return run(benchmark, samples, budget, setup, ask, store, LogReporter(), chunk)


@pytest.fixture
def store(tmp_path) -> ResultStore:
    return ResultStore(tmp_path / "store.jsonl")


def test_six_right_two_wrong_two_errors(clip, store):
    """6 of 8 answered, 6 of 10 strict, 2 failed with their reason; only the failures are asked again."""
    replies: dict[int, object] = dict.fromkeys(range(6), said("A")) | dict.fromkeys((6, 7), said("B"))
    replies |= {8: EngineError("no memory for it"), 9: EngineError("no memory for it")}
    samples = [question(i, clip) for i in range(10)]
    first = Script(replies)
    results = first.run(samples, store)
    assert [result.id for result in results] == [sample.id for sample in samples]
    found = accuracy(results)
    assert (found["strict"], found["answered"], found["n"]) == (0.6, 0.75, 10)
    assert counts(results) == {"answered": 8, "unparsed": 0, "failed": 2, "skipped": 0, "asked": 10}
    assert error_share(results) == 0.2
    assert list(reasons(results).values()) == [2]
    assert "no memory for it" in results[8].reason
    assert len(store) == 8

    second = Script(replies | {8: said("A"), 9: said("A")})
    again = second.run(samples, ResultStore(store.path))
    assert second.asked == [8, 9]
    assert again[:8] == results[:8]
    assert accuracy(again)["strict"] == 0.8


def test_a_mode_that_asks_for_an_answer_at_once_has_no_format_to_judge(clip, store):
    direct = asking(episode=EpisodeConfig(mode="direct", temperature=1.0, max_new_tokens=100))
    [result] = Script({0: "<answer>A</answer>"}).run([question(0, clip)], store, direct)
    assert (result.status, result.score, result.compliant, result.format) == ("answered", 1.0, None, None)
    found = behaviour([result])
    assert found["compliance"]["mean"] is None and found["format"]["mean"] is None
    assert found["tool_calls"]["mean"] == 0.0
    assert compliance(1.0).of([result]) == {}


def test_every_state_and_what_it_records(clip, tmp_path, store):
    samples = [
        question(0, clip),
        question(1, clip, "tvg"),
        question(2, clip, "oe"),
        question(3, clip),
        question(4, clip),
        question(5, clip),
        question(6, str(tmp_path / "none.mp4")),
        question(7, clip),
    ]
    replies = {
        0: [f"I look.\n</think>\n{CALL}", said("A")],
        1: said("2.0 to 3.0"),
        2: said("circle"),
        3: said("neither of them"),
        4: "I see.\n</think>\nA",
        5: Cut("I think and think"),
        6: said("A"),
        7: said("A"),
    }
    skip = Benchmark("skips", lambda folder: [], skip=lambda s: "no subtitles" if s.id == "q7" else None)
    script = Script(replies)
    results = script.run(samples, store, benchmark=skip)
    assert [result.status for result in results] == [
        "answered", "answered", "answered", "unparsed", "unparsed", "unparsed", "failed", "skipped",
    ]  # fmt: skip
    assert results[0].calls == 1 and results[0].compliant and results[0].format == 1.0
    assert results[1].score == 0.5
    assert results[2].score == 1.0  # an article is no word of an answer
    assert [result.score for result in results[3:]] == [0.0, 0.0, 0.0, None, None]
    assert results[3].reason == "'neither of them' names no option"
    assert results[4].reason == "no answer" and results[4].stop_reason == "no_answer"
    assert results[5].stop_reason == "truncated"
    assert "none.mp4" in results[6].reason
    assert results[7].reason == "no subtitles"
    assert (
        6 not in script.asked and 7 not in script.asked
    )  # a video without frames is never asked about blind
    assert results[0].frames_seen == 4
    shown = behaviour(results)
    assert shown["tool_calls"]["n"] == 6 and shown["tool_calls"]["mean"] == pytest.approx(1 / 6)
    assert shown["compliance"]["mean"] == pytest.approx(4 / 6)


def test_a_question_that_breaks_its_chunk_is_charged_alone(clip, store):
    replies = {0: said("A"), 1: RuntimeError("CUDA out of memory"), 2: said("A")}
    samples = [question(i, clip) for i in range(3)]
    results = Script(replies).run(samples, store)
    assert [result.status for result in results] == ["answered", "failed", "answered"]
    assert results[1].reason == "RuntimeError: CUDA out of memory"


def test_a_fault_of_the_program_is_no_wrong_answer(clip, store):
    with pytest.raises(KeyError):
        Script({0: said("A")}).run([question(0, clip), question(1, clip)], store)
    with pytest.raises(KeyboardInterrupt):
        run(BENCHMARK, [question(0, clip)], 4, asking(), _interrupted, store, LogReporter())


def _interrupted(samples, budget):
    raise KeyboardInterrupt


def test_the_key_is_everything_that_was_asked(clip, tmp_path):
    base, sample = asking(), question(0, clip)
    keys = {base.key(sample, 4), base.key(sample, 8)}
    for other in (
        asking(episode=base.episode.model_copy(update={"temperature": 0.7})),
        asking(episode=base.episode.model_copy(update={"mode": "direct"})),
        asking(episode=base.episode.model_copy(update={"max_new_tokens": 99})),
        asking(visual=VISUAL.model_copy(update={"time_marks": False})),
        asking(reward=RewardConfig(open_ended="exact")),
        asking(seed=2),
        asking(weights="other"),
        asking(code="other"),
    ):
        keys.add(other.key(sample, 4))
    keys.add(base.key(Sample("q0", clip, "Question 0, truly?", "A", "mcq", ("circle", "square")), 4))
    keys.add(base.key(Sample("q0", clip, "Question 0?", "A", "mcq", ("square", "circle")), 4))
    assert len(keys) == 12
    assert base.key(sample, 4) == asking().key(sample, 4)


def test_a_replaced_video_is_another_question(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"first")
    sample, key = question(0, str(path)), asking().key(question(0, str(path)), 4)
    path.write_bytes(b"other")
    video_fingerprint.cache_clear()
    assert asking().key(sample, 4) != key
    assert video_fingerprint(str(tmp_path / "none.mp4")) == "missing"


def test_another_budget_or_temperature_is_asked_anew(clip, store):
    samples = [question(0, clip)]
    replies = {0: said("A")}
    Script(replies).run(samples, store, budget=4)
    script = Script(replies)
    script.run(samples, store, budget=8)
    warm = asking(episode=asking().episode.model_copy(update={"temperature": 0.7}))
    script.run(samples, store, setup=warm, budget=4)
    script.run(samples, store, budget=4)
    assert script.asked == [0, 0]
    assert len(store) == 3


def test_a_kill_loses_the_chunk_in_flight_at_most(clip, store):
    samples = [question(i, clip) for i in range(6)]
    replies: dict[int, object] = dict.fromkeys(range(6), said("A"))
    dying = Script(replies | {4: KeyboardInterrupt()})

    def reply(prompt):
        number = int(prompt.text.partition("Question ")[2].partition("?")[0])
        if number == 4:
            raise KeyboardInterrupt
        return replies[number]

    dying.engine.reply = reply
    with pytest.raises(KeyboardInterrupt):
        dying.run(samples, store, chunk=2)
    with open(store.path, "a", encoding="utf-8") as file:
        file.write('{"key": "half a li')  # what kill -9 leaves
    script = Script(replies)
    results = script.run(samples, ResultStore(store.path), chunk=2)
    assert script.asked == [4, 5]
    assert [result.status for result in results] == ["answered"] * 6
    lines = store.path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6 and all(json.loads(line)["status"] == "answered" for line in lines)


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path, caplog):
    path = tmp_path / "store.jsonl"
    good = Result("k1", "q1", "mcq", 4, 0.0, "answered", score=1.0)
    ResultStore(path).append([good, Result("k2", "q2", "mcq", 4, 0.0, "failed", "reset")])
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"other": 1}\nnot json\n')
    store = ResultStore(path)
    assert store.get("k1") == good and store.get("k2") is None
    assert store.unreadable == 2 and "asked again" in caplog.text


def test_each_question_counts_once(clip, store):
    with pytest.raises(ValueError, match="occurs twice"):
        Script({0: said("A")}).run([question(0, clip), question(0, clip)], store)
    values = [Result(f"k{i}", f"q{i}", "mcq", 4, 0.0, "answered", score=float(i)) for i in range(9)]
    assert accuracy(values)["strict"] == 4.0 and accuracy(values)["n"] == 9


def test_results_can_be_written_and_read(tmp_path):
    results = [
        Result("k1", "q1", "tvg", 8, 0.7, "unparsed", "no answer", 0.0, None, "no_answer", False, 0.5, 2, 8)
    ]
    write_results(tmp_path / "r.jsonl", results)
    assert read_results(tmp_path / "r.jsonl") == results
    (tmp_path / "bad.jsonl").write_text('{"id": "q1"}\n')
    with pytest.raises(ValueError, match="bad.jsonl:1: not a result"):
        read_results(tmp_path / "bad.jsonl")


def test_accuracy_by_budget_and_type():
    def result(i, kind, budget, status, score):
        return Result(f"{budget}{i}", f"q{i}", kind, budget, 0.0, status, score=score)

    rows = [result(i, "mcq", 4, "answered", 1.0) for i in range(3)] + [result(3, "tvg", 4, "failed", None)]
    rows += [result(i, "mcq", 8, "unparsed", 0.0) for i in range(2)]
    table = accuracy_table(rows)
    assert list(table) == ["k4", "k8"] and list(table["k4"]) == ["all", "mcq", "tvg"]
    assert table["k4"]["all"]["strict"] == 0.75 and table["k4"]["all"]["answered"] == 1.0
    assert table["k4"]["tvg"]["strict"] == 0.0 and table["k4"]["tvg"]["answered"] is None
    assert table["k8"]["all"]["answered"] is None
    assert error_share([]) == 1.0


@pytest.mark.parametrize(
    "kind, answer, good",
    [("mcq", "B. square", True), ("mcq", "A or B", False), ("tvg", "2 to 3", True), ("tvg", "soon", False),
     ("oe", "a cross", True), ("oe", "...", False), ("oe", None, False)],
)  # fmt: skip
def test_an_answer_is_read_by_the_one_reader(kind, answer, good):
    assert readable(question(0, "a.mp4", kind), answer) is good


def test_registry_knows_its_benchmarks():
    assert "needles" in names()
    with pytest.raises(ValueError, match="no benchmark is called 'needle'; use one of charades, .*, needles"):
        get("needle")
    with pytest.raises(ValueError, match="registered already"):
        register(get("needles"))
    with pytest.raises(FileNotFoundError, match="dvc repro validate"):
        get("needles").load(Place(needles=Path("nowhere")))


def test_the_code_version_covers_all_that_an_episode_runs():
    """Config and local hold no behaviour of an episode: their values are in the key, or load the weights."""
    root = Path(runner.__file__).parents[1]
    graph = grimp.build_graph("paravt", cache_dir=None)
    run_by = {"paravt.agent", "paravt.rewards.score", "paravt.engines.transformers"}
    reached = run_by.union(*(graph.find_upstream_modules(module) for module in run_by))
    shaping = {path for name in runner.SHAPING for path in [root / name, *(root / name).rglob("*.py")]}
    apart = {"paravt", "paravt.config", "paravt.data"}
    for module in sorted(reached - apart):
        path = root.parent / module.replace(".", "/")
        assert {path, path.with_suffix(".py")} & shaping, module


def test_hashes_name_weights_and_code(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    assert folder_hash(tmp_path / "one") == folder_hash(tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("a card changes no answer")
    assert folder_hash(tmp_path / "one") == folder_hash(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"Weights")
    assert folder_hash(tmp_path / "one") != folder_hash(tmp_path / "two")
    assert len(code_version()) == 32 and code_version() == code_version()
