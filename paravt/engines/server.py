"""The vLLM server's process: started, watched and ended by us, or merely named by its address.

    PARAVT_VLLM_PYTHON   the interpreter that has vLLM (`.venv-vllm/bin/python`, made by `make setup-vllm`)
    PARAVT_VLLM_URLS     addresses of running servers, with commas between them; none is started then
    PARAVT_VLLM_API_KEY  their key; for servers of our own one is drawn if it is not set

A server of our own listens on loopback, answers nothing without the key (`served/key_guard.py`), and lives in
a process group that ends with its starter, however that ends (`launcher.py`). The key is handed over in the
environment: it stands on no command line, in no file and in no log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import json
import logging
import os
from pathlib import Path
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref

from paravt.chat import PATCH
from paravt.config import VisualConfig, VLLMEngineConfig
from paravt.conversation import MERGE
from paravt.engines.base import EngineError
from paravt.engines.limits import ModelFacts, PromptLimits

log = logging.getLogger("paravt")

PYTHON, URLS, KEY = "PARAVT_VLLM_PYTHON", "PARAVT_VLLM_URLS", "PARAVT_VLLM_API_KEY"
HERE = Path(__file__).resolve().parent
LOOPBACK = "127.0.0.1"
POLL_S = 0.25
GRACE_S = 10.0  # a server that was told to end is killed after that
TAIL_LINES = 20
KEPT_LOGS = 10


@dataclass(frozen=True)
class ServerPlan:
    """What is served, and how: everything that shapes the command line but host and port."""

    config: VLLMEngineConfig
    folder: Path
    facts: ModelFacts
    limits: PromptLimits
    visual: VisualConfig

    @property
    def name(self) -> str:
        """The name under which the model is served: a server of another architecture has another one."""
        return f"paravt-{self.facts.fingerprint}"

    @property
    def context(self) -> int:
        return min(self.limits.context, self.facts.context)

    def arguments(self, host: str, port: int) -> list[str]:
        """The arguments of vLLM's server. Each is stated that decides what is sampled or what is reported."""
        low, high = max(self.visual.min_pixels, (PATCH * MERGE) ** 2), self.visual.max_pixels
        high = max(low, high)
        processor = {
            "images_kwargs": {"size": {"shortest_edge": low, "longest_edge": high}},
            # never used, but vLLM sizes a clip of two frames by it even where no video is allowed
            "videos_kwargs": {"size": {"shortest_edge": 2 * low, "longest_edge": 2 * high}},
        }
        words = {
            "--model": str(self.folder.resolve()),
            "--served-model-name": self.name,
            "--host": host,
            "--port": str(port),
            "--dtype": self.config.dtype,
            "--max-model-len": str(self.context),
            "--max-num-seqs": str(self.config.max_sequences),
            "--tensor-parallel-size": str(self.config.tensor_parallel),
            "--gpu-memory-utilization": str(self.config.gpu_memory_share),
            "--limit-mm-per-prompt": json.dumps({"image": self.limits.images, "video": 0}),
            "--mm-processor-kwargs": json.dumps(processor),
            # log-probs of the distribution that is sampled from; no sampling defaults from the checkpoint
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--middleware": "key_guard.KeyGuard",
            "--worker-extension-cls": "receiver.WeightReceiver",
        }
        flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
        flags += ["--enforce-eager"] * self.config.eager
        if not self.config.chunked_prefill:  # each prompt must then fit into one step
            flags += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(8192, self.context))]
        return [word for pair in words.items() for word in pair] + flags

    def environment(self, key: str, index: int = 0) -> dict[str, str]:
        """The server's environment. Its paths are its own: nothing of this project but `served` is found."""
        dropped = ("PYTHONHOME", "VIRTUAL_ENV", KEY)
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        env |= {
            "PYTHONPATH": str(HERE / "served"),
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",  # the paths that take new weights
            "VLLM_HOST_IP": LOOPBACK,  # its own processes talk to each other there
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_cache_gib),
        }
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the cores are shared with the trainer
        if self.config.first_gpu is not None:
            first = self.config.first_gpu + index * self.config.tensor_parallel
            numbers = range(first, first + self.config.tensor_parallel)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in numbers)
        return env


def interpreter() -> Path:
    """The Python that has vLLM. Raises EngineError saying how to get one."""
    given = os.environ.get(PYTHON)
    places = [Path(given)] if given else [Path.cwd(), HERE.parents[1]]
    candidates = places if given else [place / ".venv-vllm" / "bin" / "python" for place in places]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate.absolute()  # not resolved: a link leads out of the environment
    raise EngineError(
        f"no environment with vLLM at {candidates[0]}; make one with `make setup-vllm`, or name its "
        f"interpreter in {PYTHON}"
    )


def given_urls() -> list[str]:
    """The addresses of running servers, without a slash at the end. Raises EngineError for a wrong one, and
    for one with a login: the key says who asks.
    """
    urls = [url.strip().rstrip("/") for url in os.environ.get(URLS, "").split(",") if url.strip()]
    for url in urls:
        if not re.fullmatch(r"https?://[^\s/?#@]+", url):
            shown = url.rpartition("@")[2]
            raise EngineError(
                f"{URLS} holds {shown!r}{' with a login' * ('@' in url)}; write addresses as "
                f"http://127.0.0.1:8000 and the servers' key into {KEY}"
            )
    return urls


def api_key(required: bool) -> str:
    """The key from the environment. Without one: a new one for servers of our own, else EngineError."""
    key = os.environ.get(KEY, "").strip()
    if not key and required:
        raise EngineError(f"{URLS} names servers, but {KEY} is not set; put the servers' key into it")
    return key or secrets.token_hex(24)


class VLLMServer:
    """One server of our own. It is ended by `stop`, at the latest when this process ends."""

    def __init__(self, plan: ServerPlan, key: str, log_folder: Path, index: int = 0) -> None:
        self.plan, self.index = plan, index
        self._key = key
        log_folder.mkdir(parents=True, exist_ok=True)
        logs = sorted(log_folder.glob("server-*.log"), key=lambda path: path.stat().st_mtime)
        for old in logs[:-KEPT_LOGS]:
            old.unlink(missing_ok=True)
        self.log_path = log_folder / f"server-{os.getpid()}-{index}.log"
        self.port = _free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._started = time.monotonic()
        self._start()

    def _start(self) -> None:
        command = [str(interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
        command += self.plan.arguments(LOOPBACK, self.port)
        theirs, ours = os.pipe()
        launcher = [sys.executable, "-I", str(HERE / "launcher.py"), str(theirs), str(GRACE_S)]
        try:
            with open(self.log_path, "ab") as file:
                self._process = subprocess.Popen(
                    launcher + command,
                    pass_fds=[theirs],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.plan.environment(self._key, self.index),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._started = time.monotonic()
        self.stop = weakref.finalize(self, _end, self._process, ours)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def process_group(self) -> int:
        """The id of the group that the launcher leads, with all processes of the server."""
        return self._process.pid

    def restart(self) -> None:
        """End what is left of it and start it again at the same address."""
        self.stop()
        self._start()

    def wait_ready(self) -> None:
        """Return when it answers under its name. Raises EngineError with the end of its log if it ends
        before, or is not ready in time; it is stopped then.
        """
        limit_s = self.plan.config.start_timeout_s
        try:
            while not _answers(f"{self.url}/health"):
                if not self.alive:
                    raise EngineError(f"the vLLM server ended while it started: {self.failure()}")
                if time.monotonic() - self._started > limit_s:
                    raise EngineError(f"the vLLM server was not ready after {limit_s:g} s: {self.failure()}")
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        log.info("vLLM server %d is ready after %.0f s", self.index, time.monotonic() - self._started)

    def failure(self) -> str:
        """The line of its log that says most, and where the rest is; the end of the log goes to our log."""
        lines = tail(self.log_path)
        log.error("the end of %s:\n%s", self.log_path, "\n".join(lines))
        telling = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
        said = (telling or lines or ["it wrote nothing"])[-1]
        return f"{said[:300]}; its log is {self.log_path}"


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, without colours and process prefixes."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 64_000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    kept = [re.sub(r"^\(\w[^)]*pid=\d+\) ", "", line).rstrip() for line in plain.splitlines()]
    return [line for line in kept if line][-lines:]


def _end(process: subprocess.Popen, pipe: int) -> None:
    """Let go of the launcher's pipe, and wait until the whole group is gone."""
    os.close(pipe)
    try:
        process.wait(timeout=GRACE_S + 5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback goes through no proxy


def _answers(url: str, headers: Mapping[str, str] | None = None) -> bool:
    try:
        with _DIRECT.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
