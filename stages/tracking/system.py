"""CPU, memory, disk, network and GPU load, by MLflow's own collectors, into the run's record.

MLflow's monitor writes to the server and gives up when it is away; here the figures take the same way as all
others, under the names that the System metrics page reads.
"""

from __future__ import annotations

from contextlib import suppress
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.tracking.reporter import StageReporter

FIRST_S, EVERY_S = 1.0, 10.0
PREFIX = "system/"


class SystemMetrics:
    """Samples in a thread until `finish`; the first after a second, so that a short stage has figures too."""

    def __init__(self, reporter: StageReporter) -> None:
        self._reporter = reporter
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="system-metrics")
        self._thread.start()

    def finish(self) -> None:
        self._done.set()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        if self._done.wait(FIRST_S):
            return
        monitors = _monitors()
        step = self._reporter.newest(f"{PREFIX}cpu_utilization_percentage") + 1
        while True:
            values: dict[str, float] = {}
            for monitor in monitors:
                monitor.collect_metrics()
                values |= {f"{PREFIX}{key}": value for key, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
            self._reporter.metrics(values, step)
            step += 1
            if self._done.wait(EVERY_S):
                return


def _monitors() -> list:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with suppress(ImportError, RuntimeError):  # no NVIDIA GPU, or no driver
        monitors.append(GPUMonitor())
    return monitors
