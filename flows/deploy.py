"""`python -m flows.deploy`: tell the Prefect server of the pools, the deployments and the automations.

    python -m flows.deploy                    all of it; may be repeated
    python -m flows.deploy --schedules on     the nightly evaluation and the weekly pipeline (off)

A run whose heartbeats stop is called crashed (a self-hosted server does not do so by itself), and with
PARAVT_NOTIFY_URL set (a webhook that takes JSON) a failed pipeline or evaluation is told there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
import os
from pathlib import Path
import subprocess
import sys

from stages import environment
from stages.params import ROOT

environment.apply(Path.cwd())  # Prefect reads its settings when it is imported

from prefect.automations import Automation, EventTrigger, Posture  # noqa: E402
from prefect.blocks.notifications import CustomWebhookNotificationBlock  # noqa: E402
from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402
from prefect.client.schemas.actions import (  # noqa: E402
    WorkPoolCreate,
)
from prefect.client.schemas.objects import StateType  # noqa: E402
from prefect.events.actions import ChangeFlowRunState, SendNotification  # noqa: E402
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound  # noqa: E402
from ruamel.yaml import YAML  # noqa: E402

from flows.evaluation import WORSE  # noqa: E402
from flows.links import need_server  # noqa: E402
from flows.stage import REFUSED  # noqa: E402
from stages.command import command  # noqa: E402

POOLS = ("cpu", "gpu")  # without a limit: that of a GPU machine is its worker's `--limit 1`
SILENCE = timedelta(seconds=90)  # three heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30)
ENDED = ("Completed", "Failed", "Cancelled", "Crashed", REFUSED, WORSE)
ZOMBIES, FAILURES = "crash runs without a heartbeat", "tell about failed pipelines"
NOTIFY_BLOCK = "paravt-failures"


def pools(client: SyncPrefectClient) -> None:
    """Make those that are not there; a limit that an operator has set on one stays."""
    for name in POOLS:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # a worker makes its pool as well
                client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def zombies() -> Automation:
    """Crashes a flow run that had a heartbeat, has not ended, and has had none for SILENCE."""
    beat = "prefect.flow-run.heartbeat"
    return Automation(
        name=ZOMBIES,
        trigger=EventTrigger(
            after={beat},
            expect={beat, *(f"prefect.flow-run.{state}" for state in ENDED)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its machine is gone")],
    )


def failures(url: str) -> Automation:
    """Tells a webhook about a pipeline or an evaluation that failed, crashed, or found a model worse."""
    block = CustomWebhookNotificationBlock(
        name="failures", url=url, method="POST", json_data={"subject": "{{subject}}", "text": "{{body}}"}
    )
    block_id = block.save(NOTIFY_BLOCK, overwrite=True)
    return Automation(
        name=FAILURES,
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in ("Failed", "Crashed", WORSE)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={
                "prefect.resource.name": ["pipeline", "evaluation"],
                "prefect.resource.role": "flow",
            },
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="ParaVT {{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}",
                body="{{ flow_run.state.message }}",
            )
        ],
    )


def automations() -> list[str]:
    """Create or replace ours; the names of those that are now in force."""
    wanted = [zombies()]
    if url := os.environ.get("PARAVT_NOTIFY_URL"):
        wanted.append(failures(url))
    for automation in wanted:
        with suppress(ValueError):  # there is none of that name yet
            Automation.read(name=automation.name).delete()
        automation.create()
    return [automation.name for automation in wanted]


def deployments() -> None:
    """Send prefect.yaml. Raises CalledProcessError with Prefect's own words on the terminal."""
    words = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def declared() -> set[tuple[str, str]]:
    """Entrypoint and name of each deployment in prefect.yaml."""
    known = YAML(typ="safe").load(ROOT / "prefect.yaml")
    return {(deployment["entrypoint"], deployment["name"]) for deployment in known["deployments"]}


def schedules(client: SyncPrefectClient, active: bool) -> list[str]:
    """Switch all schedules of the deployments of prefect.yaml on or off; which they are."""
    switched, ours = [], declared()
    for deployment in client.read_deployments():
        if (deployment.entrypoint, deployment.name) not in ours:
            continue
        for schedule in deployment.schedules:
            client.update_deployment_schedule(deployment.id, schedule.id, active)
            switched.append(f"{deployment.name} {getattr(schedule.schedule, 'cron', '')}")
    return switched


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.deploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", choices=["on", "off"], help="only switch the schedules")
    options = parser.parse_args(arguments)
    with command("deploy"):
        need_server("deploy")
        with get_client(sync_client=True) as client:
            if options.schedules:
                for name in schedules(client, options.schedules == "on"):
                    print(f"{name}: {options.schedules}")
                return 0
            pools(client)
            deployments()
        print("pools cpu, gpu; deployments of prefect.yaml; automations: " + ", ".join(automations()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
