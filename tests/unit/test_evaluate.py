"""The evaluate stage: what is asked, what is written, and when it refuses to call it a result."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest

from paravt import benchmarks
from paravt.benchmarks.results import Result, read_results
from paravt.config import TransformersEngineConfig
from paravt.local import open_model
from paravt.reporter import LogReporter
from paravt.rollout import Sample
from stages import params as parameters
from stages.evaluate import complaint, evaluate, flat, metrics_of, plan, write_outputs
from stages.headline import headline
from tests.tiny import tiny_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def params():
    found = parameters.load(ROOT / "params.yaml")
    asked = {
        "budgets": [2, 4],
        "questions_per_budget": 6,
        "format_questions": 8,
        "format_temperatures": [0.7, 1.0],
    }
    episode = {"max_new_tokens": 12}
    return found.model_copy(
        update={
            "evaluate": found.evaluate.model_copy(update=asked),
            "episode": found.episode.model_copy(update=episode),
        }
    )


@pytest.fixture
def samples(tmp_path) -> list[Sample]:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(20):
            image = np.full((32, 32, 3), 5 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return [Sample(f"q{i}", str(path), f"Question {i}?", "A", "mcq", ("circle", "square")) for i in range(10)]


def test_each_question_is_asked_at_each_budget_and_once_per_temperature(params, samples):
    asked = plan(params, samples)
    greedy = {budget: [s.id for s in part] for temperature, budget, part in asked if not temperature}
    assert greedy == {2: [f"q{i}" for i in range(6)], 4: [f"q{i}" for i in range(6)]}
    for temperature in (0.7, 1.0):
        parts = {budget: [s.id for s in part] for t, budget, part in asked if t == temperature}
        assert sorted(sum(parts.values(), [])) == [f"q{i}" for i in range(8)]
        assert set(parts) == {2, 4} and all(parts.values())
    assert plan(params, samples) == asked
    by_temperature = [[(b, [s.id for s in p]) for t, b, p in asked if t == want] for want in (0.7, 1.0)]
    assert by_temperature[0] == by_temperature[1]


def test_equal_runs_write_equal_bytes(params, samples, tmp_path):
    """Whether answers come from the model or from the store of an earlier run."""
    benchmark = benchmarks.get("needles")
    written = []
    for number, store in enumerate(("one.jsonl", "two.jsonl", "one.jsonl")):
        results = evaluate(params, tiny_folder(), benchmark, samples, tmp_path / store, LogReporter())
        target = tmp_path / f"out{number}"
        metrics = metrics_of(results)
        write_outputs(target, results, metrics, headline(results))
        written.append({path.name: path.read_bytes() for path in target.iterdir()})
    assert written[0] == written[1] == written[2]
    assert sorted(written[0]) == ["headline.json", "metrics.json", "results.jsonl"]
    assert len(read_results(target / "results.jsonl")) == 2 * 6 + 2 * 8
    assert metrics["counts"]["asked"] == 28
    few = json.loads(written[0]["headline.json"])
    assert few["accuracy_k2"] == pytest.approx(metrics["accuracy"]["k2"]["all"]["strict"], abs=1e-6)
    assert {"accuracy", "accuracy_k4", "compliance_t0.7", "compliance_t1", "tool_calls"} < set(few)
    assert len(few) < 16  # a row of `dvc metrics show`
    assert set(metrics["sampled"]) == {"t0.7", "t1"} and set(metrics["greedy"]) == {"k2", "k4"}
    assert "seconds" not in json.dumps(metrics)
    assert metrics["accuracy"]["k2"]["all"]["n"] == 6
    assert all(isinstance(value, float) for value in flat(metrics).values())


def test_the_number_format_is_part_of_what_an_answer_is_kept_for(params, samples, tmp_path):
    benchmark, store = benchmarks.get("needles"), tmp_path / "answers.jsonl"
    few = params.model_copy(
        update={"evaluate": params.evaluate.model_copy(update={"budgets": [2], "format_temperatures": []})}
    )

    def keys(dtype: str) -> set[str]:
        chosen = few.model_copy(update={"engine": few.engine.model_copy(update={"dtype": dtype})})
        results = evaluate(chosen, tiny_folder(), benchmark, samples[:2], store, LogReporter())
        return {result.key for result in results}

    assert not keys("float32") & keys("bfloat16")


def test_an_engine_loads_its_weights_in_the_format_that_is_written(params):
    for dtype in ("float32", "bfloat16"):
        engine = params.engine.model_copy(update={"dtype": dtype})
        with open_model(tiny_folder(), params.visual, engine) as (made, _):
            assert str(made.model.dtype) == f"torch.{dtype}"
    auto = TransformersEngineConfig()
    assert (auto.precision(None), auto.precision("cuda")) == ("float32", "bfloat16")


def test_too_many_errors_are_told_in_one_sentence():
    good = [Result(f"k{i}", f"q{i}", "mcq", 4, 0.0, "answered", score=1.0) for i in range(48)]
    bad = [Result(f"b{i}", f"b{i}", "mcq", 4, 0.0, "failed", "the engine is away") for i in range(2)]
    assert complaint(good, 0.02) is None
    assert complaint(good + bad[:1], 0.0205) is None
    words = complaint(good + bad, 0.02)
    assert words == (
        "2 of 50 questions failed or were skipped (4.0%, allowed 2.0%), most often (2): the engine is away"
    )
    assert complaint([], 0.02).startswith("0 of 0 questions failed or were skipped (100.0%")


def test_failed_questions_count_as_wrong_and_have_no_behaviour():
    rows = [Result("k1", "q1", "mcq", 4, 0.0, "answered", score=1.0, compliant=True, format=1.0, calls=2)]
    rows += [Result("k2", "q2", "mcq", 4, 0.0, "failed", "reset")]
    found = metrics_of(rows)
    assert found["accuracy"]["k4"]["all"]["strict"] == 0.5
    assert found["accuracy"]["k4"]["all"]["answered"] == 1.0
    assert found["greedy"]["k4"]["compliance"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    assert found["greedy"]["k4"]["counts"]["failed"] == 1
    assert found["error_share"] == 0.5
