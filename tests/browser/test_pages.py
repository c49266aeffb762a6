"""What a person needs to see is on the pages: the arms, a chart, an episode, the champion, the report."""

from __future__ import annotations

import pytest

from tests.browser.conftest import ARMS
from tests.browser.pages import Pages

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def pages(browser, world, pictures) -> Pages:
    return Pages(browser, world[0].uri, pictures)


def shows_something(picture) -> None:
    assert 10_000 < picture.stat().st_size < 300_000


def test_the_runs_table_has_the_arms(pages):
    text = pages.runs(*(f"{arm}, seed 1" for arm in ARMS))
    assert "4 matching runs" in text.replace("\n", " ")
    shows_something(pages.keep("runs"))


def test_a_chart_compares_the_arms(pages):
    text = pages.charts("result/", "result/accuracy")
    for arm in ARMS:
        assert f"{arm}, seed 1" in text  # the legend says which bar is which
    shows_something(pages.keep("chart"))


def test_the_training_curves_of_the_arms_lie_in_one_chart(pages):
    """As docs/tracking.md says: the runs of the stage, all selected."""
    names = {run.info.run_name for run in stage_runs(pages, "para_grpo")}
    assert names == {f"para_grpo ({arm}, seed 1)" for arm in ARMS}
    for run in stage_runs(pages, "para_grpo"):
        history = pages.client.get_metric_history(run.info.run_id, "reward/total")
        assert [point.step for point in history] == [1, 2]


def stage_runs(pages: Pages, stage: str) -> list:
    return list(pages.client.search_runs([pages.experiment], f"tags.`dvc.stage` = '{stage}'"))


def parallel_trace(pages: Pages):
    """The trace with the most crops side by side; of those one whose answer is right."""

    def worth(trace) -> tuple[int, bool]:
        root = next(span for span in trace.data.spans if span.parent_id is None)
        crops = sum(span.name.startswith("crop ") for span in trace.data.spans)
        return crops, root.outputs["answer"] is not None and root.outputs["answer"] == root.outputs[
            "right answer"
        ]

    return max(pages.client.search_traces(locations=[pages.experiment], max_results=100), key=worth)


def test_an_episode_shows_its_crops_side_by_side(pages):
    trace = parallel_trace(pages)
    crops = [span for span in trace.data.spans if span.name.startswith("crop ")]
    assert len(crops) >= 2 and len({crop.start_time_ns for crop in crops}) == 1
    text = pages.trace(trace.info.trace_id, "main turn 1", *(crop.name for crop in crops), "gather")
    question = next(span for span in trace.data.spans if span.parent_id is None).inputs["question"]
    assert question in text and "right answer" in text
    shows_something(pages.keep("trace"))


def test_the_registry_shows_the_champion_and_why(pages):
    text = pages.open("models/paravt-smoke", "champion")
    assert "Version 1" in text
    shows_something(pages.keep("registry"))
    text = pages.open("models/paravt-smoke/versions/1", "promotion.reason")
    assert "the first model" in text and "dvc.hash" in text
    shows_something(pages.keep("version"))


def test_the_report_opens_without_a_network(browser, world, pictures):
    context = browser.new_context(offline=True, viewport={"width": 1100, "height": 1400})
    page = context.new_page()
    failed: list[str] = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.goto((world[1] / "reports/report/report.html").as_uri())
    text = page.inner_text("body")
    assert "What training changed" in text and "PARA-GRPO" in text
    drawn = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
    assert drawn and all(drawn) and not failed
    page.screenshot(path=pictures / "report.png")
