"""Servers as processes: how they are started, how a failed start reads, and that none is left behind."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import psutil
import pytest

from paravt.config import EpisodeConfig, SubagentConfig, VisualConfig, VLLMEngineConfig
from paravt.conversation import Visual
from paravt.engines import EngineError, server
from paravt.engines.limits import ModelFacts, PromptLimits
from paravt.engines.served.key_guard import KeyGuard
from paravt.engines.server import KEY, PYTHON, ServerPlan, VLLMServer, api_key, interpreter, tail
from paravt.engines.wire import FrameUrls, collapse
from paravt.model import load_model
from tests.standin import decode
from tests.tiny import VISUAL, tiny_folder, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAD = 7


def plan(**config) -> ServerPlan:
    options = VLLMEngineConfig(**{"start_timeout_s": 20.0} | config)
    facts = ModelFacts.of(tiny_folder())
    return ServerPlan(options, tiny_folder(), facts, PromptLimits(20, 3000), VISUAL)


def pretend(folder: Path, monkeypatch, script: str) -> None:
    """A shell script in the place of the interpreter that has vLLM."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(path))


def gone(group: int, seconds: float = 20) -> bool:
    """Whether the process group is empty, within some time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not members(group):
            return True
        time.sleep(0.05)
    return False


def members(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def test_the_command_line_states_what_decides_the_samples_and_never_the_key():
    words = plan(dtype="bfloat16", tensor_parallel=2, first_gpu=4).arguments("127.0.0.1", 8123)
    given_ = dict(zip(words[::2], words[1::2], strict=False))
    assert given_["--logprobs-mode"] == "processed_logprobs"
    assert given_["--generation-config"] == "vllm"
    assert json.loads(given_["--limit-mm-per-prompt"]) == {"image": 20, "video": 0}
    size = json.loads(given_["--mm-processor-kwargs"])["images_kwargs"]["size"]
    assert size == {"shortest_edge": VISUAL.min_pixels, "longest_edge": VISUAL.max_pixels}
    assert (given_["--max-model-len"], given_["--tensor-parallel-size"]) == ("3000", "2")
    assert given_["--served-model-name"].startswith("paravt-")
    assert not any("key" in word and word != "key_guard.KeyGuard" for word in words)
    env = plan(tensor_parallel=2, first_gpu=4).environment("s3cret", index=1)
    assert (env["CUDA_VISIBLE_DEVICES"], env["VLLM_API_KEY"]) == ("6,7", "s3cret")
    assert env["PYTHONPATH"].endswith("engines/served") and KEY not in env


def test_the_name_is_of_the_architecture_and_not_of_the_weights(tmp_path):
    base = ModelFacts.of(tiny_folder())
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_folder() / name).read_bytes())
    assert ModelFacts.of(tmp_path) == base
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    assert ModelFacts.of(tmp_path) == base
    config["vision_config"]["dtype"] = config["text_config"]["dtype"] = "float32"  # a saved copy says so
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelFacts.of(tmp_path) == base
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelFacts.of(tmp_path).fingerprint != base.fingerprint


def test_the_facts_are_those_of_the_loaded_model():
    from paravt.model import unsampled_ids

    facts, model = ModelFacts.of(tiny_folder()), tiny_model()
    assert list(facts.unsampled_ids) == unsampled_ids(model)
    assert facts.vocabulary == model.config.text_config.vocab_size
    assert facts.context == model.config.text_config.max_position_embeddings
    assert facts.image_pad_id == model.config.image_token_id


def test_a_saved_model_keeps_its_name(tmp_path):
    from paravt.model import save_model

    base = ROOT / "models" / "tiny-base"
    save_model(load_model(base), base, tmp_path)
    assert ModelFacts.of(tmp_path) == ModelFacts.of(base)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(EngineError, match=f"{tmp_path} is not a complete"):
        ModelFacts.of(tmp_path)


def test_limits_follow_the_configuration():
    visual = VisualConfig(min_pixels=1024, max_pixels=50_176, crop_max_frames=16)
    episode = EpisodeConfig(
        max_turns=3, max_calls=5, max_new_tokens=2048, subagent=SubagentConfig(max_new_tokens=512)
    )
    text = PromptLimits.of(episode, visual, 64)
    assert text.images == 64
    assert text.context > 64 * 49 + 4 * 2048 + 15 * 512
    inline = PromptLimits.of(episode.model_copy(update={"dispatch": "frames"}), visual, 64)
    assert inline.images == 64 + 3 * 5 * 16
    one = PromptLimits.of(episode.model_copy(update={"dispatch": "sequential"}), visual, 64)
    assert one.context < text.context
    assert PromptLimits.of(episode, visual, 4).images == 16  # a sub-agent's crop


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=6))
def test_collapsed_prompts_expand_to_themselves(parts):
    ids, visuals = [], []
    for words, rows, columns in parts:
        ids += [100 + i for i in range(words)] + [PAD] * (rows * columns)
        visuals.append(Visual("a.mp4", 0.0, (1, 2 * rows, 2 * columns)))
    ids.append(200)
    short = collapse(tuple(ids), visuals, PAD)
    assert short.count(PAD) == len(visuals)
    sizes = iter([visual.token_count for visual in visuals])
    assert [t for token in short for t in [token] * (next(sizes) if token == PAD else 1)] == ids


def test_a_run_of_pads_that_is_no_frame_is_refused():
    visuals = [Visual("a.mp4", 0.0, (1, 4, 4)), Visual("a.mp4", 1.0, (1, 4, 4))]
    with pytest.raises(EngineError, match="frame 0 needs 4 image pads in a row"):
        collapse((1, PAD, PAD, 2, PAD, PAD, PAD, PAD, PAD, PAD), visuals, PAD)


def test_frames_are_sent_without_loss_and_encoded_once():
    noise = np.random.default_rng(0)
    images = [noise.integers(0, 256, (32, 64, 3), dtype=np.uint8) for _ in range(3)]
    urls = FrameUrls(most_bytes=20_000)
    first = [urls.of(image) for image in images]
    for url, image in zip(first, images, strict=True):
        np.testing.assert_array_equal(decode(url), image)
    assert urls.of(images[2].copy()) is first[2]
    assert urls.of(images[0]) is not first[0]  # pushed out: three do not fit
    assert urls.of(np.asarray(images[0].reshape(64, 32, 3))) != urls.of(images[0])


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/collective_rpc", None, 401),
        ("/collective_rpc", b"Bearer wrong", 401),
        ("/collective_rpc", b"Bearer right", 200),
        ("/v1/models", None, 401),
        ("/v1/models", b"Bearer right", 200),
    ],
)
def test_the_guard_asks_for_the_key_on_every_path(monkeypatch, path, header, status):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert answered(KeyGuard(app), path, header) == status


def test_the_guard_without_a_key_answers_nothing(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert answered(KeyGuard(app), "/collective_rpc", b"Bearer ") == 401


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answered(guard: KeyGuard, path: str, header: bytes | None) -> int:
    sent = []

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"authorization", header)] if header is not None else []
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, None, send))
    return sent[0]["status"]


def test_without_an_environment_the_way_to_make_one_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv(PYTHON, str(tmp_path / "none"))
    with pytest.raises(EngineError, match="make setup-vllm"):
        interpreter()


def test_own_servers_get_a_key_that_nobody_knows(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    assert len(api_key(required=False)) == 48 != api_key(required=False)
    monkeypatch.setenv(KEY, "mine")
    assert api_key(required=False) == api_key(required=True) == "mine"


def test_a_server_that_dies_while_it_starts_says_why(monkeypatch, tmp_path):
    red = 'echo "\\033[31mValueError: the weights are of another kind\\033[0m"'
    pretend(tmp_path, monkeypatch, f'echo "loading"; {red}; sleep 0.2; exit 3')
    subject = VLLMServer(plan(), "s3cret", tmp_path / "logs")
    with pytest.raises(EngineError, match="ended while it started: ValueError: the weights") as caught:
        subject.wait_ready()
    assert str(subject.log_path) in str(caught.value)
    assert "exit code 3" in subject.log_path.read_text()
    assert "s3cret" not in subject.log_path.read_text()
    assert gone(subject.process_group)


def test_a_server_that_is_never_ready_is_ended(monkeypatch, tmp_path):
    pretend(tmp_path, monkeypatch, 'echo "still loading"; sleep 600')
    subject = VLLMServer(plan(start_timeout_s=1.0), "s3cret", tmp_path / "logs")
    with pytest.raises(EngineError, match="was not ready after 1 s: still loading"):
        subject.wait_ready()
    assert gone(subject.process_group)


STUBBORN = "trap '' TERM; (trap '' TERM; sleep 600) & echo up; while true; do sleep 1; done"


def test_stop_ends_the_whole_group_even_if_it_will_not(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    pretend(tmp_path, monkeypatch, STUBBORN)
    subject = VLLMServer(plan(), "s3cret", tmp_path / "logs")
    assert not gone(subject.process_group, 1)
    started = time.monotonic()
    subject.stop()
    assert gone(subject.process_group)
    assert time.monotonic() - started < 4


OWNER = """
import sys
from pathlib import Path
from tests.unit.test_vllm_server import plan
from paravt.engines.server import VLLMServer
subject = VLLMServer(plan(), "s3cret", Path(sys.argv[1]))
print(subject.process_group, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_starter_that_is_killed_leaves_no_server(monkeypatch, tmp_path, number):
    pretend(tmp_path, monkeypatch, "(sleep 600) & sleep 600")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "logs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    group = int(owner.stdout.readline())
    assert not gone(group, 0.5)
    owner.send_signal(number)
    owner.wait(20)
    assert gone(group)


def test_a_launcher_that_is_killed_takes_its_command_with_it(monkeypatch, tmp_path):
    pretend(tmp_path, monkeypatch, "exec sleep 600")
    subject = VLLMServer(plan(), "s3cret", tmp_path / "logs")
    deadline = time.monotonic() + 20
    while len(members(subject.process_group)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(subject.process_group, signal.SIGKILL)
    assert gone(subject.process_group)
    subject.stop()


def test_the_tail_of_a_log_has_neither_colours_nor_prefixes(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(
        "x\n\x1b[0;36m(APIServer pid=12)\x1b[0;0m INFO ready\n\n(EngineCore pid=3) KeyError: 'a'\n"
    )
    assert tail(path) == ["x", "INFO ready", "KeyError: 'a'"]
    assert tail(tmp_path / "none") == []


def test_tied_weights_are_handed_over_with_their_head(tmp_path):
    from safetensors.torch import load_file

    from paravt.engines.tied import with_head

    aside = tmp_path / "aside"
    for _ in range(2):  # filled anew each time
        assert with_head(tiny_folder(), aside) == aside
    weights = {}
    for path in aside.glob("*.safetensors"):
        weights |= load_file(path)
    own = tiny_model().state_dict()
    assert weights["lm_head.weight"].equal(own["lm_head.weight"])
    assert weights.keys() == own.keys()
    index = json.loads((aside / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == own.keys() and all((aside / name).exists() for name in index.values())


def test_weights_that_are_not_tied_stay_where_they_are(tmp_path):
    from paravt.engines.tied import with_head

    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false, "text_config": {}}')
    assert with_head(tmp_path, tmp_path / "aside") == tmp_path
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(EngineError, match="holds no weights"):
        with_head(tmp_path, tmp_path / "aside")


def test_serve_becomes_the_server_with_the_flags_of_params_yaml(monkeypatch, tmp_path, capsys):
    from paravt import cli

    monkeypatch.chdir(tmp_path)
    settings = {
        "visual": {"min_pixels": 1024, "max_pixels": 2048},
        "budget": {"choices": [4, 24]},
        "engine": {"name": "vllm", "dtype": "bfloat16"},
    }
    (tmp_path / "params.yaml").write_text(json.dumps(settings))
    pretend(tmp_path, monkeypatch, "exit 0")
    monkeypatch.delenv(KEY, raising=False)
    assert cli.main(["serve", str(tiny_folder())]) == cli.UNUSABLE
    assert f"set {KEY}" in capsys.readouterr().err

    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    monkeypatch.setenv(KEY, "s3cret")
    cli.main(["serve", str(tiny_folder()), "--port", "8123"])
    [(path, command, env)] = started
    assert path == str(tmp_path / "python") and env["VLLM_API_KEY"] == "s3cret"
    given_ = dict(zip(command[3::2], command[4::2], strict=False))
    assert (given_["--host"], given_["--port"], given_["--dtype"]) == ("127.0.0.1", "8123", "bfloat16")
    assert json.loads(given_["--limit-mm-per-prompt"])["image"] == 24
    assert "s3cret" not in capsys.readouterr().out
