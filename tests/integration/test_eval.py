"""`paravt eval` from arguments to files: seven splits, resume, parts, comparison, endpoint, judge."""

from __future__ import annotations

import json
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from paravt import cli, local
from paravt.benchmarks import PUBLISHED
from paravt.benchmarks.results import read_results
from paravt.engines import EngineError, chat_client
from tests.benchmark_tables import MAKERS, place_in, write_split
from tests.chat_server import ChatServer, Fault
from tests.clips import write_clip
from tests.fakes import ScriptedEngine
from tests.tiny import tiny_encoder, tiny_folder

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-base"
COUNT = 8


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working folder with the tables and clips of all splits, and settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_client, "FIRST_WAIT_S", 0.001)
    clip = write_clip(tmp_path / "clip.mp4", 40, fps=2, size=(32, 32))
    for name in MAKERS:
        write_split(place_in(tmp_path), name, COUNT, clip)
    settings = {
        "visual": {"min_pixels": 1024, "max_pixels": 1024},
        "episode": {"mode": "agentic_minimal", "max_new_tokens": 60, "subagent": {"max_new_tokens": 20}},
        "budget": {"choices": [2, 4]},
    }
    Path("params.yaml").write_text(json.dumps(settings))
    return tmp_path


def said(text: str) -> str:
    return f"I see.\n</think>\n<answer>{text}</answer>"


def reply(prompt) -> str:
    """B to each choice, the gold span, an open answer that is half right."""
    if "start to end" in prompt.text:
        return said("24.3 to 30.4")
    return said("tension" if "in a few words" in prompt.text else "B")


@pytest.fixture
def scripted(monkeypatch) -> ScriptedEngine:
    from contextlib import contextmanager

    engine = ScriptedEngine(tiny_encoder(), reply)

    @contextmanager
    def opened(folder, visual, *served):
        engine.opened = getattr(engine, "opened", 0) + 1
        yield engine, tiny_encoder()

    monkeypatch.setattr(local, "open_model", opened)
    return engine


def run(*words: str) -> int:
    return cli.main(["eval", "--tables", "hub", "--media", "media", "--needles", "needles", *words])


def model(*words: str) -> int:
    return run("--model", str(tiny_folder()), *words)


def test_seven_splits_end_in_figures_and_a_table(place, scripted, capsys):
    assert model("--benchmarks", ",".join(PUBLISHED), "--out", "out") == 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert set(summary) == set(PUBLISHED)
    for name, figures in summary.items():
        results = read_results(f"out/{name}.jsonl")
        assert len(results) == COUNT == figures["counts"]["answered"]
        assert figures["asked"]["overview_frames"] == 4 and figures["asked"]["weights"]
    strict = {name: figures["headline"]["strict"] for name, figures in summary.items()}
    assert strict["videomme"] == strict["lvbench"] == 0.25 and strict["charades"] == 1.0
    assert strict["longvideobench"] == pytest.approx(3 / 8)
    assert summary["charades"]["measure"] == "mIoU" and summary["charades"]["recall"]["0.7"] == 1.0
    assert summary["mlvu"]["macro"]["groups"] == 3
    assert set(summary["videomme"]["by"]["duration"]) == {"short", "medium", "long"}
    assert summary["mmvu"]["over"] == "choices" and summary["mmvu"]["headline"]["n"] == 6
    assert summary["mmvu"]["by"]["type"]["open"]["strict"] == pytest.approx(2 / 3)
    assert summary["videomme"]["table"] == {"rows": 8, "published_rows": 2700, "set_aside": {}}
    assert sum(part["n"] for part in summary["lvbench"]["by"]["task"].values()) == 12, "counted in each type"
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["videomme"][:2] == ["videomme", "25.0"] and lines["charades"][1] == "100.0"
    assert "macro over 3 groups of task" in out and "R@0.5 100.0" in out


def test_answers_are_kept_and_only_failures_are_asked_again(place, scripted, capsys):
    scripted.reply = lambda prompt: (
        EngineError("no memory for it") if "007" in prompt.text or "vid2" in prompt.text else reply(prompt)
    )
    words = ("--benchmarks", "videomme,charades", "--out", "out", "--mode", "agentic")
    assert model(*words) == 1
    captured = capsys.readouterr()
    assert "failed or were skipped" in captured.err and "no memory for it" in captured.out
    first = read_results("out/videomme.jsonl")
    assert [result.status for result in first].count("failed") == 2
    asked = sum(len(call) for call in scripted.calls)
    scripted.reply = reply
    assert model(*words) == 0
    assert sum(len(call) for call in scripted.calls) == asked + 2
    assert model(*words) == 0 and scripted.opened == 2, "nothing to ask, so no model is opened"
    again = read_results("out/videomme.jsonl")
    assert [r for r in again if r.id in {f.id for f in first if f.status == "answered"}] == first[:6]
    assert model(*words, "--budget", "2") == 0 and scripted.opened == 3, "another budget is another question"


def test_parts_give_the_same_bytes(place, scripted):
    names = ("--benchmarks", "videomme,mlvu,charades")
    assert model(*names, "--out", "whole") == 0
    for part in ("3/3", "1/3", "2/3"):
        assert model(*names, "--out", "parts", "--part", part) == 0
    assert not Path("parts/summary.json").exists()
    opened = scripted.opened
    assert model(*names, "--out", "parts") == 0 and scripted.opened == opened
    for name in ("videomme.jsonl", "mlvu.jsonl", "charades.jsonl", "summary.json"):
        assert Path("whole", name).read_bytes() == Path("parts", name).read_bytes()


def test_a_limit_draws_from_the_whole_table_and_grows(place, scripted):
    words = ("--benchmarks", "videomme", "--out", "out", "--limit")
    assert model(*words, "3") == 0
    few = {result.id for result in read_results("out/videomme.jsonl")}
    assert model(*words, "5") == 0
    more = [result.id for result in read_results("out/videomme.jsonl")]
    assert few < set(more) and len(more) == 5
    assert sum(len(call) for call in scripted.calls) == 5
    assert more == sorted(more), "in the order of the table"
    assert not few <= {f"00{i // 3}-{i % 3 + 1}" for i in range(3)}, "not the first ones"


def test_missing_videos_are_skipped_and_told(place, scripted, capsys):
    next(Path("media").glob("*/data/vid0.mp4")).unlink()
    assert model("--benchmarks", "videomme", "--out", "out", "--json") == 1
    figures = json.loads(capsys.readouterr().out)["videomme"]
    assert figures["counts"] == {"answered": 5, "unparsed": 0, "failed": 0, "skipped": 3, "asked": 8}
    assert figures["reasons"] == {"the video vid0.mp4 is not on this machine": 3}
    assert model("--benchmarks", "videomme", "--out", "out", "--max-error-share", "0.5") == 0


def test_compare_pairs_questions(place, scripted, capsys):
    assert model("--benchmarks", "videomme,mlvu", "--out", "a") == 0
    scripted.reply = lambda prompt: said("C") if "woman" in prompt.text else said("B")
    # another seed is another key: the second run asks anew
    assert model("--benchmarks", "videomme,charades", "--out", "b", "--seed", "2", "--limit", "6") == 0
    capsys.readouterr()
    assert cli.main(["eval", "compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"videomme"}
    pairing = found["videomme"]
    assert pairing["only_first"] == 2 and pairing["only_second"] == pairing["changed"] == 0
    assert pairing["better"] + pairing["worse"] + pairing["equal"] == 6 and pairing["better"] == 2
    assert cli.main(["eval", "compare", "a", "b"]) == 0
    assert "left out: 2 only in the first" in capsys.readouterr().out
    assert cli.main(["eval", "compare", "a", "nowhere"]) == 2
    assert "holds no summary.json" in capsys.readouterr().err


def test_a_report_stands_beside_the_published_table(place, scripted, capsys):
    assert model("--benchmarks", "videomme,charades,mmvu", "--out", "mine", "--limit", "6") == 0
    capsys.readouterr()
    assert cli.main(["eval", "report", "mine", "--out", "page.md"]) == 0
    page = capsys.readouterr().out
    assert page == Path("page.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("|")}
    assert "| model | kind | videomme | mmvu | charades |" in page
    assert "| 62.1 | 68.6 | 50.1 |" in lines["ParaVT-8B"] and lines["GPT-4o"].endswith("| 71.9 | 66.7 | - |")
    assert "+49.9" in lines["mine - ParaVT-8B"] and "100.0 [100.0, 100.0]" in lines["**mine**"]
    for words in ("4 overview frames, published 64", "a draw of 6 questions", "8 rows, published 2700",
                  "reported in words by a sub-agent", "Options are lettered once"):  # fmt: skip
        assert words in page
    assert cli.main(["eval", "report", "mine", "--beside", "GPT-5"]) == 2
    assert "has no 'GPT-5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "give either --model DIR or --endpoint URL"),
        (("--model", "nowhere", "--endpoint", "http://h"), "give either"),
        (("--model", str(TINY)), "give --benchmarks"),
        (("--model", str(TINY), "--benchmarks", "mmlu"), "no benchmark is called 'mmlu'"),
        (("--model", "nowhere", "--benchmarks", "mmvu"), "not a complete model folder"),
        (("--model", str(TINY), "--benchmarks", "mmvu", "--open-ended", "judge"), "needs --judge URL"),
        (("--model", str(TINY), "--benchmarks", "needles"), "run `dvc repro validate` first"),
        (
            ("--model", str(TINY), "--benchmarks", "mmvu", "--tables", "no"),
            "paravt eval fetch --benchmarks mmvu",
        ),
        (("--endpoint", "h:1", "--benchmarks", "mmvu", "--tokenizer", str(TINY)), "is no endpoint"),
        (("--endpoint", "http://h", "--benchmarks", "mmvu"), "give --tokenizer"),
        (("--model", str(TINY), "--benchmarks", "mmvu", "--mode", "loud"), "episode.mode"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(place, scripted, capsys, words, said):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def endpoint(server: ChatServer, *words: str) -> int:
    return run("--endpoint", server.url, "--tokenizer", str(TINY), *words)


def test_an_endpoint_is_scored_and_said_to_be_one(place, capsys):
    def answer(body):
        text = str(body["messages"][-1]["content"])
        return (
            f"<think>\nI see.\n</think>\n<answer>{'24.3 to 30.4' if 'start to end' in text else 'B'}</answer>"
        )

    with ChatServer(answer) as server:
        assert endpoint(server, "--benchmarks", "videomme_wsub,charades") == 0
        assert len(server.requests) == 16
    figures = json.loads(Path("reports/eval/video-8b/summary.json").read_text())
    assert figures["charades"]["headline"]["strict"] == 1.0
    asked = figures["charades"]["asked"]
    assert asked["endpoint"]["model"] == "video-8b" and "log-probs are absent" in asked["endpoint"]["note"]
    assert asked["episode"]["force_think"] is False and asked["engine"] == "openai"


def test_an_endpoint_that_goes_away_ends_the_run_and_keeps_its_answers(place, capsys):
    with ChatServer(lambda body: "<answer>B</answer>") as server:
        asked = []

        def answer(body):
            asked.append(1)
            if len(asked) == 5:
                server.fail(*[Fault(drop=True)] * 1000)
            return "<answer>B</answer>"

        server.reply = answer
        words = ("--benchmarks", "videomme", "--out", "out", "--chunk", "2", "--in-flight", "1")
        assert endpoint(server, *words) == 1
        kept = Path("out/answers/all.jsonl").read_text().splitlines()
        assert len(kept) >= 4
        server._faults.clear()
        server.reply = lambda body: "<answer>B</answer>"
        server.requests.clear()
        assert endpoint(server, *words) == 0
        assert len(server.requests) == 8 - len(kept)


def test_a_baseline_is_asked_in_its_own_words(place, scripted, capsys):
    from tests.unit.test_upstream import FILES, family_of

    for name in ("time-r1", "videozoomer"):
        for file in family_of(name).files:
            path = Path("prompts", name, file)
            path.parent.mkdir(parents=True)
            path.write_text(FILES[file], encoding="utf-8")
    scripted.reply = lambda prompt: "<think>a</think><answer>(B)</answer>"
    words = ("--benchmarks", "mmvu", "--out", "out", "--prompts-folder", "prompts", "--max-error-share", "1")
    assert model(*words, "--mode", "upstream:time-r1") == 0
    figures = json.loads(Path("out/summary.json").read_text())["mmvu"]
    assert figures["counts"]["skipped"] == 2 and figures["reasons"] == {
        "time-r1 has no prompt for oe questions": 2
    }  # fmt: skip
    assert figures["asked"]["upstream"]["commit"] == family_of("time-r1").commit
    assert figures["asked"]["episode"]["force_think"] is False
    text = tiny_encoder().tokenizer.decode(list(scripted.calls[0][0].ids))
    assert "Best option." in text and "Think in <think>" not in text
    replies = ('<video_zoom>{"segment": [1, 3], "fps": 2}</video_zoom>', "<answer>\\boxed{B}</answer>")
    scripted.reply = lambda prompt: f"<think>a</think>{replies[prompt.turn]}"
    assert model(*words, "--mode", "upstream:videozoomer") == 0
    figures = json.loads(Path("out/summary.json").read_text())["mmvu"]
    assert figures["tools"]["calls_per_question"] == 1.0 and figures["counts"]["answered"] == 8
    capsys.readouterr()
    assert model(*words, "--mode", "upstream:sage") == 2
    assert "paravt eval fetch --prompts sage" in capsys.readouterr().err


JUDGE = '{{"code": "{code}", "score": {score}}}'


def verdict(body, score=0.5):
    code = body["messages"][0]["content"].partition('{"code": "')[2].partition('"')[0]
    return JUDGE.format(code=code, score=score)


def test_open_answers_are_judged_and_a_judge_that_is_away_gives_no_score(place, scripted, capsys):
    words = ("--benchmarks", "mmvu", "--out", "out", "--open-ended", "judge", "--judge-model", "video-8b")
    with ChatServer(verdict) as judge:
        judge.fail(*[Fault(500)] * 1000)
        judged = (*words, "--judge", judge.url)
        assert model(*judged) == 1
        results = {result.id: result for result in read_results("out/mmvu.jsonl")}
        lost = results["validation_2"]
        assert lost.status == "failed" and lost.score is None and lost.answer == "tension"
        assert lost.reason.startswith("no verdict: the judge is away")
        asked = sum(len(call) for call in scripted.calls)
        judge._faults.clear()
        assert model(*judged) == 0
        assert sum(len(call) for call in scripted.calls) == asked, "the answer is kept, its verdict fetched"
        results = {result.id: result for result in read_results("out/mmvu.jsonl")}
        assert results["validation_2"].score == 0.5 and results["validation_2"].reason is None
        assert model(*judged) == 0
    assert "judge" in json.loads(Path("out/summary.json").read_text())["mmvu"]["asked"]


KILLED = """
import sys
from paravt.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.lifecycle
def test_a_kill_loses_what_was_in_flight_at_most(place):
    """A real process over a real endpoint, killed by SIGKILL in the middle; the next one goes on."""

    def slow(body):
        time.sleep(0.05)
        return "<answer>B</answer>"

    with ChatServer(slow) as server:
        words = ["--tables", "hub", "--media", "media", "--endpoint", server.url, "--tokenizer", str(TINY)]
        words += ["--benchmarks", "videomme,mlvu,lvbench", "--out", "out", "--chunk", "2", "--in-flight", "2"]
        command = [sys.executable, "-c", KILLED, "eval", *words]
        process = subprocess.Popen(command, cwd=place, stderr=subprocess.DEVNULL)
        try:
            answers = place / "out" / "answers" / "all.jsonl"
            while not answers.exists() or answers.read_bytes().count(b"\n") < 6:
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = answers.read_bytes().count(b"\n")
        before = len(server.requests)
        assert kept < 24 and before - kept <= 2, "two were in flight"
        server.requests.clear()
        assert subprocess.run(command, cwd=place, stderr=subprocess.DEVNULL, timeout=120).returncode == 0
        assert len(server.requests) == 24 - kept
    assert all(
        len(read_results(place / "out" / f"{name}.jsonl")) == 8 for name in ("videomme", "mlvu", "lvbench")
    )


def test_two_runs_do_not_write_one_file(place, scripted, capsys):
    from paravt.benchmarks.session import _alone

    with _alone(Path("out/answers/all.jsonl")):
        assert model("--benchmarks", "mmvu", "--out", "out") == 2
    assert "another run is writing out/answers/all.jsonl" in capsys.readouterr().err


def test_whole_episodes_are_kept_on_request(place, scripted, capsys):
    assert model("--benchmarks", "charades", "--out", "out", "--limit", "2", "--save-rollouts") == 0
    capsys.readouterr()
    assert cli.main(["rollout", "show", "out/rollouts.jsonl", "--index", "1"]) == 0
    assert "24.3 to 30.4" in capsys.readouterr().out


def test_a_real_model_is_asked(place):
    """No script: the random tiny model writes noise, and each question still ends in a state."""
    assert (
        model("--benchmarks", "longvideobench", "--out", "out", "--limit", "3", "--max-new-tokens", "8") == 0
    )
    states = [result.status for result in read_results("out/longvideobench.jsonl")]
    assert len(states) == 3 and set(states) <= {"answered", "unparsed"}
