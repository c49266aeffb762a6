"""The pages that a person opens, as a browser opens them; each leaves a picture."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from mlflow import MlflowClient

QUIET = """
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""
WAIT_MS = 90_000


class Pages:
    """One browser window on one MLflow server."""

    def __init__(self, browser, uri: str, pictures: Path) -> None:
        self.uri, self.pictures = uri, pictures
        self.client = MlflowClient(uri)
        self.experiment = self.client.get_experiment_by_name("paravt").experiment_id
        context = browser.new_context(viewport={"width": 1440, "height": 860})
        context.add_init_script(QUIET)
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)

    def open(self, path: str, *texts: str) -> str:
        """Open a page, wait until each of `texts` is on it; what a person can read there."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.uri}/#/{path}")
        for text in texts:
            self.page.get_by_text(text).first.wait_for()
        return self.page.inner_text("body")

    def keep(self, name: str) -> Path:
        """A picture of the page as it stands."""
        path = self.pictures / f"{name}.png"
        self.page.wait_for_timeout(1500)  # charts are drawn with an animation
        self.page.screenshot(path=path)
        return path

    def runs(self, *texts: str) -> str:
        wanted = quote("tags.`dvc.stage` = 'pipeline'")
        return self.open(f"experiments/{self.experiment}/runs?searchFilter={wanted}", *texts)

    def charts(self, section: str, *texts: str) -> str:
        """The chart view of the pipelines, the charts of one section only."""
        wanted = quote("tags.`dvc.stage` = 'pipeline'")
        self.open(f"experiments/{self.experiment}/runs?searchFilter={wanted}&compareRunsMode=CHART")
        self.page.get_by_placeholder("Search metric charts").fill(section)
        for text in texts:
            self.page.get_by_text(text).first.wait_for()
        return self.page.inner_text("body")

    def trace(self, trace_id: str, *texts: str) -> str:
        """An episode with the timeline of its spans."""
        path = f"experiments/{self.experiment}/traces?selectedEvaluationId={trace_id}"
        self.open(path, *texts)
        hint = self.page.get_by_role("button", name="Got it")
        if hint.count() and hint.first.is_visible():
            hint.first.click(force=True)
        self.page.get_by_label("Show execution timeline").click()
        return self.page.inner_text("body")
