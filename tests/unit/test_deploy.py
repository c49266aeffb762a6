"""What the Prefect server is told: no run that has ended is taken for a zombie."""

from __future__ import annotations

import re

from flows.deploy import zombies
from stages.params import ROOT


def test_every_state_of_our_own_ends_the_wait_for_a_heartbeat():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "flows").glob("*.py"))
    names = set(re.findall(r"(?:Failed|Completed|Cancelled|Crashed)\(\s*name=(\w+)", sources))
    assert names == {"REFUSED", "WORSE"}
    states = {re.search(rf'^{name} = "(\w+)"', sources, re.M)[1] for name in names}
    ends = {"Completed", "Failed", "Cancelled", "Crashed"} | states
    assert {f"prefect.flow-run.{state}" for state in ends} <= zombies().trigger.expect
