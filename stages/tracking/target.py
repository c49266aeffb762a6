"""Where runs are kept: a tracking server, or a SQLite file at the repository root."""

from __future__ import annotations

from contextlib import suppress
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file at the repository root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


class Target:
    """One tracking server and the experiment in it."""

    def __init__(self, root: Path) -> None:
        # the library's own patience (minutes) would hold up the end of a stage; the record can wait
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
        import mlflow

        for chatty in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self.root = root
        self.uri = tracking_uri(root)
        _make_whole(self.uri)
        mlflow.set_tracking_uri(self.uri)
        self.client = mlflow.MlflowClient(self.uri)
        self._experiment: str | None = None

    @property
    def experiment(self) -> str:
        """The id of MLFLOW_EXPERIMENT_NAME, by default `paravt`; made if it is not there."""
        if self._experiment is None:
            from mlflow.exceptions import MlflowException

            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paravt")
            found = self.client.get_experiment_by_name(name)
            if found is None:
                local = self.uri.startswith("sqlite:")
                folder = (self.root / "mlartifacts").as_uri() if local else None
                try:
                    self._experiment = self.client.create_experiment(name, artifact_location=folder)
                except MlflowException:  # another stage was faster
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            self._experiment = self._experiment or found.experiment_id
        return self._experiment

    def page(self, run_id: str) -> str | None:
        """Where a person sees the run, without credentials; None if tracking is a file."""
        if not self.uri.startswith("http"):
            return None
        parts = urlsplit(self.uri)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        return f"{place}/#/experiments/{self.experiment}/runs/{run_id}"


def _make_whole(uri: str) -> None:
    """Make a SQLite store aside and put it in place: one that was killed half made never works again."""
    import mlflow

    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists() or not path.name:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.new-{os.getpid()}")
    mlflow.MlflowClient(f"sqlite:///{aside}").search_experiments(max_results=1)
    with suppress(FileExistsError):  # unlike a rename, a link leaves the store of a faster process in place
        os.link(aside, path)
    for leftover in path.parent.glob(f"{path.name}.new-*"):  # also of those that were killed meanwhile
        leftover.unlink(missing_ok=True)
