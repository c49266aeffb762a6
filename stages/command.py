"""How a stage ends on the command line: in silence, or with one sentence and a non-zero exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import logging
from pathlib import Path
import sys

from paravt.errors import sentence
from stages import environment, supply
from stages.params import ParamsError
from stages.redact import cover
from stages.tracking.journal import Busy

FAILED, UNUSABLE = 1, 2


@contextmanager
def command(name: str) -> Iterator[None]:
    """Run the body of the stage `name`; an error that speaks for itself ends with its sentence.

    Stages that use published media have those that this machine lacks brought first.
    Raises SystemExit(2) for parameters that cannot be run and for work that is running already, SystemExit(1)
    for other such errors. A fault of the program keeps its traceback.
    """
    cover()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    environment.apply(Path.cwd())
    try:
        supply.bring(name.partition("@")[0])
        yield
    except Exception as error:  # the boundary of a process
        words = sentence(error)
        if words is None:
            raise
        if isinstance(error, OSError) and error.strerror:
            words += "; nothing finished is lost, run again to continue"
        fail(name, words, UNUSABLE if isinstance(error, ParamsError | Busy) else FAILED)


def fail(name: str, words: str, code: int = FAILED) -> None:
    """Print one sentence and raise SystemExit(code)."""
    print(f"{name}: {words}", file=sys.stderr)
    raise SystemExit(code) from None
