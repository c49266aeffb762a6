"""The promotion flow with a Prefect server: it promotes by the figures, and waits for a person if told to."""

from __future__ import annotations

from collections.abc import Iterator
import threading
import time

from prefect.testing.utilities import prefect_test_harness
import pytest

from flows.promotion import promotion
from tests.unit.test_registry import aliases, checkout, make, trained

__all__ = ["checkout"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=300):
        yield


def resume_when_paused(answer: dict, seen: list[str]) -> None:
    """What a person does on the run's page."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    wanted = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PAUSED"]}}})
    with get_client(sync_client=True) as client:
        for _ in range(240):
            for run in client.read_flow_runs(flow_run_filter=wanted):
                seen.append(run.state.name)
                client.resume_flow_run(run.id, run_input=answer)
                return
            time.sleep(0.5)


def test_by_the_figures_and_by_a_person(server, checkout):
    registry = make(checkout)
    trained(checkout, "one", sft=30, para_grpo=45)
    assert promotion(str(checkout)).champion == "1"  # nobody is asked

    for weights, approve, holder in (("two", False, 1), ("three", True, 3)):
        trained(checkout, weights, sft=30, para_grpo=60)
        seen: list[str] = []
        answer = {"approve": approve, "reason": f"seen {weights}"}
        person = threading.Thread(target=resume_when_paused, args=(answer, seen))
        person.start()
        verdict = promotion(str(checkout), ask=True)
        person.join()
        assert seen == ["Paused"]
        assert aliases(registry)["champion"] == holder
        said = "approved" if approve else "declined"
        assert verdict.decision.reason.endswith(f"a person {said}: seen {weights}")

    trained(checkout, "four", sft=30, para_grpo=50)
    began = time.monotonic()
    assert promotion(str(checkout), ask=True).champion == "3"  # worse: refused without asking
    assert time.monotonic() - began < 60
