"""Settings of the tools that this project drives: no telemetry, no downloads unasked, servers that have time.

The Makefile exports the same; here they stand for commands that are started without it. What the environment
already says is kept. None of them changes what is computed.
"""

from __future__ import annotations

import os
from pathlib import Path

SETTINGS = {
    "DO_NOT_TRACK": "true",  # MLflow accepts only this word, Prefect's client too
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


def apply(root: Path) -> None:
    """Set what is not set. Prefect keeps its state in the repository folder, not in the home folder."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str(root / ".prefect"))
