"""The report: figures from results, verdicts, a page that opens offline, equal bytes from equal inputs."""

from __future__ import annotations

from html.parser import HTMLParser
import json
from pathlib import Path
import shutil
import struct

import numpy as np
import pytest

from paravt.benchmarks.results import Result, write_results
from stages import figures
from stages import params as parameters
from stages.document import Bullets, Figure, Heading, Paragraph, Table, to_html, to_markdown
from stages.report import ReportError, build, read_inputs, write_report
from stages.tables import difference, number

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 60
KINDS = ("mcq", "mcq", "tvg", "oe")


def results(accuracy: float, compliance: float, calls: int, seed: int) -> list[Result]:
    """Greedy at K = 4 and 8, sampled at 0.7 and 1; one failed and one unparsed question."""
    rng = np.random.default_rng(seed)
    found = []
    for temperature, budget in ((0.0, 4), (0.0, 8), (0.7, 4), (1.0, 4)):
        for i in range(QUESTIONS):
            base = {
                "key": f"{seed}-{temperature}-{budget}-{i}",
                "id": f"q{i}",
                "question_type": KINDS[i % 4],
                "budget": budget,
                "temperature": temperature,
            }
            if i == 0:
                found.append(Result(**base, status="failed", reason="a video is cut"))
                continue
            status = "unparsed" if i == 1 else "answered"
            score = 0.0 if i == 1 else float(rng.random() < accuracy)
            compliant = bool(rng.random() < compliance)
            found.append(
                Result(
                    **base,
                    status=status,
                    score=score,
                    answer="A",
                    stop_reason="answered",
                    compliant=compliant,
                    format=1.0 if compliant else 0.5,
                    calls=calls,
                    frames_seen=budget,
                )
            )
    return found


MODELS = {
    "base": results(0.2, 0.1, 1, 1),
    "sft": results(0.5, 0.6, 2, 2),
    "para_grpo": results(0.9, 0.95, 2, 3),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("reports")
    for name, found in MODELS.items():
        folder = tmp_path / "evaluate" / name
        folder.mkdir(parents=True)
        write_results(folder / "results.jsonl", found)
    curves = {
        "sft": [{"step": i, "loss": 2 / i, "grad_norm": 1.0} for i in range(1, 20)],
        "para_grpo": [{"step": i, "reward/total": i / 10, "compliance": 0.5} for i in range(1, 10)],
    }
    for name, steps in curves.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    return tmp_path


@pytest.fixture
def reports(inputs, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(inputs, tmp_path / "reports"))


@pytest.fixture(scope="module")
def params():
    return parameters.load(ROOT / "params.yaml")


@pytest.fixture(scope="module")
def built(inputs, params):
    return build(read_inputs(inputs, params))


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_equal_inputs_give_equal_bytes_and_no_paths(reports, params, built):
    write_report(reports / "one", *built)
    write_report(reports / "two", *build(read_inputs(reports, params)))
    first = everything(reports / "one")
    assert sorted(first) == [
        "metrics.json",
        "plots/accuracy.png",
        "plots/training_para_grpo.png",
        "plots/training_sft.png",
        "report.html",
        "report.md",
    ]
    assert first == everything(reports / "two")
    assert not any(str(reports).encode() in content for content in first.values())
    # A report that is there is replaced whole: no old plot stays.
    (reports / "two" / "plots" / "old.png").write_bytes(b"")
    write_report(reports / "two", *built)
    assert first == everything(reports / "two")


def test_plots_carry_no_text_chunks(built):
    for block in built[0]:
        if isinstance(block, Figure):
            kinds = png_chunks(block.png)
            assert {"IHDR", "IDAT", "IEND"} <= set(kinds)
            assert not {"tEXt", "iTXt", "zTXt", "tIME"} & set(kinds)


def png_chunks(data: bytes) -> list[str]:
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    kinds, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kinds.append(data[at + 4 : at + 8].decode())
        at += 12 + length
    return kinds


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_opens_offline(reports, built):
    write_report(reports / "report", *built)
    page = (reports / "report" / "report.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.open == []
    assert len(links.found) == 3
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert "http" not in page.replace("http-equiv", "")
    text = (reports / "report" / "report.md").read_text(encoding="utf-8")
    for plot in ("accuracy", "training_sft", "training_para_grpo"):
        assert f"(plots/{plot}.png)" in text


def test_strict_accuracy_counts_what_failed_as_wrong(built):
    metrics = built[1]
    found = metrics["models"]["base"]["accuracy_k4_all"]
    scores = [r.score or 0.0 for r in MODELS["base"] if r.temperature == 0 and r.budget == 4]
    assert found["n"] == QUESTIONS == len(scores)
    assert found["mean"] == pytest.approx(sum(scores) / QUESTIONS)
    assert found["low"] < found["mean"] < found["high"]
    assert (
        metrics["models"]["base"]["compliance_t0.7"]["n"] == QUESTIONS - 1
    )  # a failed episode has no format
    pair = metrics["differences"]["para_grpo_minus_sft"]["accuracy_k4_all"]
    sft, para = (metrics["models"][name]["accuracy_k4_all"]["mean"] for name in ("sft", "para_grpo"))
    gap = para - sft
    assert pair["mean"] == pytest.approx(gap) and pair["questions"] == QUESTIONS


def test_claims_follow_the_figures():
    verdicts = {claim.key: claim.verdict for claim in figures.claims([MODELS])}
    assert verdicts == {
        "sft_compliance_t0.7": "shown",
        "sft_compliance_t1": "shown",
        "para_compliance_t1": "shown",
        "para_accuracy_k4": "shown",
        "para_calls_kept": "shown",
    }
    swapped = {"base": MODELS["base"], "sft": MODELS["para_grpo"], "para_grpo": MODELS["sft"]}
    verdicts = {claim.key: claim.verdict for claim in figures.claims([swapped])}
    assert verdicts["para_compliance_t1"] == "the opposite is seen"
    same = {"base": MODELS["base"], "sft": MODELS["sft"], "para_grpo": MODELS["sft"]}
    verdicts = {claim.key: claim.verdict for claim in figures.claims([same])}
    assert verdicts["para_accuracy_k4"] == "not shown"
    silent = results(0.9, 0.9, 0, 4)
    verdicts = {claim.key: claim.verdict for claim in figures.claims([{**MODELS, "para_grpo": silent}])}
    assert verdicts["para_calls_kept"] == "the opposite is seen"


def test_seeds_are_paired_over_the_questions_that_all_have():
    other = {name: results(a, 0.9, 2, seed) for name, a, seed in (("sft", 0.5, 5), ("para_grpo", 0.9, 6))}
    shorter = {name: found[: QUESTIONS - 10] for name, found in other.items()}  # greedy at K = 4 only
    seeds = [{name: MODELS[name] for name in other}, shorter]
    found = figures.compare(figures.accuracy(4, "all"), seeds)
    gap = found.differences["sft", "para_grpo"]
    assert gap.questions == found.intervals["sft"].n == QUESTIONS - 10
    assert len(gap.by_seed) == 2 and gap.clear
    alone = figures.compare(figures.accuracy(4, "all"), seeds[:1]).differences["sft", "para_grpo"]
    assert alone.questions == QUESTIONS and len(alone.by_seed) == 1


def test_both_accuracies_and_all_states_are_told(built):
    blocks, _ = built
    counts = next(block for block in blocks if isinstance(block, Table) and "asked" in block.header)
    row = next(row for row in counts.rows if row[0] == "PARA-GRPO, greedy, K = 4")
    assert row[1:6] == ["60", "58", "1", "1", "0"]
    assert float(row[6]) < float(row[7])
    made = [item for block in blocks if isinstance(block, Bullets) for item in block.items]
    assert any("this project pretrained" in item for item in made)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: shutil.rmtree(folder / "evaluate" / "sft"), "run `dvc repro evaluate@sft` first"),
        (lambda folder: (folder / "sft" / "metrics.jsonl").unlink(), "run `dvc repro sft` first"),
        (lambda folder: (folder / "sft" / "metrics.jsonl").write_text(""), "is empty"),
        (lambda folder: (folder / "sft" / "metrics.jsonl").write_text("{"), "a line is not JSON"),
        (lambda folder: (folder / "evaluate/base/results.jsonl").write_text("{}\n"), ":1: not a result"),
    ],
)
def test_what_is_missing_is_named_with_what_to_run(reports, params, damage, words):
    damage(reports)
    with pytest.raises(ReportError, match=words):
        read_inputs(reports, params)


@pytest.mark.parametrize(
    "value, percent, signed, text",
    [
        (0.6214, True, False, "62.1"),
        (-0.0001, True, True, "0.0"),
        (0.031, True, True, "+3.1"),
        (-0.5, False, True, "-0.50"),
        (0.0, False, True, "0.00"),
        (1.0, True, False, "100.0"),
        (None, True, False, "–"),
    ],
)
def test_numbers_are_written_alike(value, percent, signed, text):
    assert number(value, percent, signed) == text


def test_nothing_shared_is_a_dash():
    assert figures.difference([{"q1": 1.0}], [{"q2": 1.0}]) is None
    assert difference(None, True) == "–"


def test_a_page_is_escaped_in_both_forms():
    blocks = [
        Heading("A < B"),
        Paragraph("use `x < y` & go"),
        Table(["", "a|b"], [["r", "<tool_call>"]], "c"),
        Figure("f", b"png", 'says "hi"'),
    ]
    page = to_html("T <1>", blocks)
    assert "<title>T &lt;1&gt;</title>" in page and "<code>x &lt; y</code> &amp; go" in page
    assert "&lt;tool_call&gt;" in page and 'alt="says &quot;hi&quot;"' in page
    text = to_markdown(blocks)
    assert text == (
        "## A < B\n\nuse `x < y` & go\n\n|  | a\\|b |\n| --- | --: |\n| r | <tool_call> |\n\nc\n\n"
        '![says "hi"](plots/f.png)\n\nsays "hi"\n'
    )
