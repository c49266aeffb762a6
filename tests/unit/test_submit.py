"""The parent's side: what it makes of the states of its children."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import uuid4

from prefect.states import Cancelled, Cancelling, Running

from flows import submit
from flows.submit import Board


def board() -> Board:
    return Board(clone=None, branch="runs/a", commit="c", graph=())


class Client:
    def __init__(self, *states) -> None:
        self.states = list(states)

    def read_flow_run(self, run) -> SimpleNamespace:
        return SimpleNamespace(state=self.states.pop(0))


def test_a_child_that_is_being_cancelled_is_waited_for(monkeypatch):
    monkeypatch.setattr(submit, "POLL_S", 0.001)
    client = Client(Cancelling(), Cancelling(), Cancelled())
    assert board()._awake(client, uuid4()).is_cancelled() and not client.states
    assert board()._awake(Client(Running()), uuid4()).is_running()


def test_a_parent_that_is_stopped_waits_no_longer():
    stopped = board()
    stopped.stopping.set()
    assert stopped._awake(Client(Cancelling()), uuid4()).is_cancelling()
