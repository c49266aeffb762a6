"""Prefect's pages in a real browser: deployments with their schedules, a pipeline's run and what it made."""

from __future__ import annotations

import pytest

from tests.chromium import browser, pictures
from tests.stack.conftest import World

__all__ = ["browser", "pictures"]
pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_MS = 60_000


@pytest.fixture
def page(browser):
    """A window of a browser; what it asks of other machines is refused."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.route(
        "**/*", lambda route: route.continue_() if "//127.0.0.1" in route.request.url else route.abort()
    )
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    yield opened
    context.close()


def test_deployments_and_their_schedules_and_a_run_with_its_links(world: World, page, pictures):
    site = world.stack.environment["PREFECT_API_URL"].removesuffix("/api")
    page.goto(f"{site}/deployments")
    for name in ("evaluation", "pipeline", "paravt-promotion", "registered", "branch"):
        page.get_by_text(name, exact=True).first.wait_for()
    page.get_by_text("At 01:00 AM every day").first.wait_for()
    page.screenshot(path=pictures / "prefect-deployments.png")
    page.get_by_role("row").filter(has_text="pipeline").get_by_role("link", name="remote").click()
    page.get_by_text("weekly", exact=True).wait_for()
    page.screenshot(path=pictures / "prefect-deployment.png")

    world.branch("pages", "pages")
    run = world.start(ref="pages")
    assert world.end(run).is_completed()
    page.goto(f"{site}/runs/flow-run/{run.id}")
    for stage in ("first", "train", "last"):
        page.get_by_text(stage, exact=True).first.wait_for()
    page.wait_for_timeout(2000)
    page.screenshot(path=pictures / "prefect-run.png")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("the runs in MLflow").click()
    page.get_by_role("link", name=f"{world.stack.environment['MLFLOW_TRACKING_URI']}/#/").wait_for()
    page.screenshot(path=pictures / "prefect-artifact.png")
