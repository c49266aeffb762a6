"""What rollouts ahead of the trainer save: seconds of a step against the longer of its two sides.

    python -m bench.overlap [--model models/tiny-base] [--steps 8] [--engine vllm|wait] [--out FILE]

The rollouts (server, client and readers) are held on one core, the trainer on another. Three runs of the same
steps, whose draws are the same and whose weights do not move:

    rollout alone      the steps rolled out, nothing else
    in turn            `staleness: 0`; reward + train + sync of its steps is the trainer alone
    ahead              `staleness: 1`

`--engine wait` takes an engine that only sleeps in place of the server. Medians over steps, the first two
left out: they warm up, and the first one has nothing to overlap with. Writes --out as JSON.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
import json
import os
from pathlib import Path
import statistics
import sys
import tempfile
import threading
import time

from paravt.chat import ChatEncoder
from paravt.config import OptimiserConfig, Params
from paravt.data.needles import make_split
from paravt.engines.base import Engine, Generation, Request
from paravt.engines.factory import make_engine
from paravt.engines.limits import PromptLimits
from paravt.grpo import GRPOSetup, train
from paravt.grpo.rollouts import StepRollouts
from paravt.model import load_encoder, load_model
from paravt.rewards import score
from paravt.rollout import Rollout, Sample
from stages.params import check, compose

ROLLOUT_CORE, TRAINER_CORE = 0, 1
WARM_UP = 2
FILLER = "look at the part again and say what shows there\n"


class Waiting:
    """Sleeps, then answers half of the samples rightly; `seconds` are those of a whole call."""

    def __init__(self, encoder: ChatEncoder, seconds: float) -> None:
        self.seconds = seconds
        self.counts: Counter[str] = Counter()
        self.weight_version = 0
        texts = [f"{FILLER * 12}</think>\n<answer>{letter}</answer>" for letter in "AB"]
        self._ids = [[*encoder.tokenizer.encode(text), min(encoder.end_ids)] for text in texts]

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        time.sleep(self.seconds)
        return [[self._answer(number) for number in range(request.sampling.n)] for request in requests]

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        return self.generate(requests)

    def load_weights(self, folder: str, version: int) -> None:
        self.weight_version = version

    def _answer(self, number: int) -> Generation:
        ids = self._ids[number % 2]
        return Generation(list(ids), [-1.0] * len(ids), "stop", self.weight_version)


class Held:
    """An engine whose callers, in threads other than the trainer's, are held on the rollouts' core."""

    def __init__(self, inner: Engine, trainer: int) -> None:
        self.inner, self.trainer, self.counts = inner, trainer, inner.counts

    def generate(self, requests: list[Request]) -> list[list[Generation]]:
        self._hold()
        return self.inner.generate(requests)

    async def generate_async(self, requests: list[Request]) -> list[list[Generation]]:
        self._hold()
        return await self.inner.generate_async(requests)

    def load_weights(self, folder: str, version: int) -> None:
        self._hold()
        self.inner.load_weights(folder, version)

    def _hold(self) -> None:
        if (thread := threading.get_native_id()) != self.trainer:
            os.sched_setaffinity(thread, {ROLLOUT_CORE})


class Times:
    """A reporter that keeps the seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.steps.append({name: value for name, value in values.items() if name.startswith("time/")})

    def rollouts(self, rollouts: list[Rollout], step: int) -> None: ...

    def progress(self, done: int, total: int, note: str = "") -> None: ...

    def median(self, *names: str) -> float:
        return statistics.median(sum(step[f"time/{n}_s"] for n in names) for step in self.steps[WARM_UP:])


@contextmanager
def held_on(core: int):
    """This thread, and what it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def setup_of(params: Params, steps: int, staleness: int) -> GRPOSetup:
    still = OptimiserConfig(learning_rate=1e-12)
    few = {"steps": steps, "save_every": steps, "staleness": staleness, "optimiser": still}
    return GRPOSetup.of(params.model_copy(update={"grpo": params.grpo.model_copy(update=few)}))


def alone(engine: Engine, encoder: ChatEncoder, samples: list[Sample], setup: GRPOSetup) -> float:
    """Median seconds of the rollouts of a step, in a thread of their own while nothing else runs."""
    rollouts = StepRollouts(engine, encoder, samples, setup, partial(score, config=setup.reward))
    seconds = []
    with ThreadPoolExecutor(1) as thread:
        for step in range(setup.grpo.steps):
            started = time.monotonic()
            thread.submit(rollouts.roll_out, step, range(setup.grpo.prompts_per_step)).result()
            seconds.append(time.monotonic() - started)
    return statistics.median(seconds[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/tiny-base"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--engine", choices=["vllm", "wait"], default="vllm")
    parser.add_argument("--wait-s", type=float, default=1.0, help="of one call of the engine that waits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")

    params = check(compose(["engine=vllm"]))
    encoder = load_encoder(options.model, params.visual)
    limits = PromptLimits.of(params.episode, params.visual, max(params.budget.choices))

    def trained(engine: Engine, samples: list[Sample], staleness: int, scratch: Path) -> Times:
        times, model = Times(), load_model(options.model)
        with held_on(TRAINER_CORE):
            train(
                model,
                None,
                engine,
                encoder,
                samples,
                setup_of(params, options.steps, staleness),
                times,
                scratch,
            )
        return times

    with tempfile.TemporaryDirectory() as holder:
        folder = Path(holder)
        samples, _ = make_split(params.data.needles, 1, "eval", 32, folder, f"{folder}/")

        def measure(inner: Engine) -> dict[str, float]:
            engine = Held(inner, threading.get_native_id())
            rollout_s = alone(engine, encoder, samples, setup_of(params, options.steps, 0))
            in_turn = trained(engine, samples, 0, folder / "in-turn")
            ahead = trained(engine, samples, 1, folder / "ahead")
            trainer_s = in_turn.median("reward", "train", "sync")
            step_s = ahead.median("step")
            return {
                "rollout_alone_s": rollout_s,
                "trainer_alone_s": trainer_s,
                "in_turn_step_s": in_turn.median("step"),
                "ahead_step_s": step_s,
                "ahead_over_longer": step_s / max(rollout_s, trainer_s),
                "in_turn_over_ahead": in_turn.median("step") / step_s,
            }

        if options.engine == "wait":
            figures = measure(Waiting(encoder, options.wait_s))
        else:
            with ExitStack() as servers:
                with held_on(ROLLOUT_CORE):
                    engine = servers.enter_context(
                        make_engine(params.engine, options.model, encoder, limits, log_folder=folder / "logs")
                    )
                figures = measure(engine)
    result = {"engine": options.engine, "steps": options.steps, "load_average": os.getloadavg()[0], **figures}
    for name, value in result.items():
        print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
