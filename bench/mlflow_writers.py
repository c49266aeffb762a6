"""How many concurrent writers an MLflow server takes: N processes log batches, then every point is counted.

    python -m bench.mlflow_writers [--writers 200] [--batches 5] [--postgres | --uri URI]

A server is started on loopback, on SQLite or on a PostgreSQL of its own (`initdb` of the machine; psycopg2
must be installed). Each writer is a process with its own run and MLflow's own client and retries, as a stage
has. All begin at the same moment. A point is lost if it is not in the run's history afterwards. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
import glob
import json
import multiprocessing
import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

METRIC, METRICS = "reward/total", 50  # points in a batch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--writers", type=int, default=200, help="(%(default)s)")
    parser.add_argument(
        "--batches", type=int, default=5, help="batches of 50 points a writer sends (%(default)s)"
    )
    parser.add_argument("--postgres", action="store_true", help="the server stands on PostgreSQL, not SQLite")
    parser.add_argument("--workers", type=int, default=4, help="worker processes of the server (%(default)s)")
    parser.add_argument("--uri", help="a server that runs already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlflow-writers-") as folder:
        os.chmod(folder, 0o755)  # PostgreSQL runs as a user of its own
        if options.uri:
            measured = measure(options.uri, options.writers, options.batches)
        else:
            with store(Path(folder), options.postgres) as backend, server(backend, options.workers) as uri:
                measured = measure(uri, options.writers, options.batches)
    kind = "given" if options.uri else "postgresql" if options.postgres else "sqlite"
    print(json.dumps({"store": kind, "server workers": options.workers, **measured}))
    return 0 if measured["lost"] == 0 else 1


def measure(uri: str, writers: int, batches: int) -> dict[str, float | int]:
    """Counts and times of one burst against the server at `uri`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.create_experiment(f"writers-{time.time_ns()}")
    runs = [client.create_run(experiment).info.run_id for _ in range(writers)]
    context = multiprocessing.get_context("fork")  # an import of MLflow in each would take the machine's time
    start, slowest = context.Event(), context.Queue()
    processes = [
        context.Process(target=write, args=(uri, run, batches, start, slowest), daemon=True) for run in runs
    ]
    for process in processes:
        process.start()
    time.sleep(1.0)
    began = time.monotonic()
    start.set()
    told = [slowest.get(timeout=1800) for _ in processes]
    seconds = time.monotonic() - began
    for process in processes:
        process.join()
    asked = writers * batches * METRICS
    kept = sum(len(client.get_metric_history(run, METRIC)) for run in runs)
    calls = sorted(each for times, _ in told for each in times)
    return {
        "writers": writers,
        "points": asked,
        "lost": asked - kept,
        "writers that were refused": sum(bool(error) for _, error in told),
        "first refusal": next((error for _, error in told if error), ""),
        "seconds": round(seconds, 1),
        "points per second": round(kept / seconds),
        "median call s": round(calls[len(calls) // 2], 2) if calls else 0,
        "slowest call s": round(calls[-1], 2) if calls else 0,
    }


def write(uri: str, run: str, batches: int, start, told) -> None:
    """One writer: its batches one after the other; stops at the first that the client gives up."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(uri)
    times: list[float] = []
    error = ""
    start.wait()
    try:
        for step in range(batches):
            began = time.monotonic()
            now = int(time.time() * 1000)
            steps = range(step * METRICS, (step + 1) * METRICS)
            client.log_batch(run, [Metric(METRIC, float(place), now, place) for place in steps])
            times.append(time.monotonic() - began)
    except Exception as refusal:  # worker boundary: a refusal is what is measured
        error = str(refusal).splitlines()[0][:200]
    told.put((times, error))


@contextmanager
def server(backend: str, workers: int) -> Iterator[str]:
    """An MLflow server on loopback; its address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend, "--port", str(port)]
    env = dict(os.environ) | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--workers", str(workers)],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def wait_for(address: str, process: subprocess.Popen, log, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    log.seek(0)
    raise RuntimeError(f"the MLflow server did not start: {log.read()[-2000:]}")


@contextmanager
def store(folder: Path, postgres: bool) -> Iterator[str]:
    """A fresh store: a SQLite file, or a PostgreSQL on a free port that is ended afterwards."""
    if not postgres:
        yield f"sqlite:///{folder / 'mlflow.db'}"
        return
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    initdb = shutil.which("initdb") or (found[-1] if found else None)
    if initdb is None:
        raise RuntimeError("PostgreSQL is not installed here; on Debian: apt-get install postgresql")
    bin_folder, data, port = Path(initdb).parent, folder / "postgres", free_port()
    data.mkdir()
    as_user: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(data, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    quiet = {"stdout": subprocess.DEVNULL, "cwd": "/", "check": True}
    subprocess.run([*as_user, initdb, "-D", str(data), "-A", "trust", "-U", "mlflow"], **quiet)
    settings = f"-p {port} -k {data} -c listen_addresses=127.0.0.1 -c max_connections=300"
    control = [*as_user, str(bin_folder / "pg_ctl"), "-D", str(data), "-w"]
    subprocess.run([*control, "-l", str(data / "log"), "-o", settings, "start"], **quiet)
    try:
        yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "fast", "stop"], **quiet)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
