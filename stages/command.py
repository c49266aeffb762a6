"""How a stage ends on the command line: in silence, or with one sentence and a non-zero exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import logging
from pathlib import Path
import sys

from paravt.errors import sentence
from stages import environment
from stages.params import ParamsError
from stages.redact import cover
from stages.tracking.journal import Busy

FAILED, UNUSABLE = 1, 2
USE_MEDIA = ("sft", "para_grpo", "evaluate")
PREPARED_MEDIA = Path("data/prepared/media.jsonl")


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
        if name.partition("@")[0] in USE_MEDIA:
            ensure_prepared()
        yield
    except Exception as error:  # the boundary of a process
        words = sentence(error)
        if words is None:
            raise
        if isinstance(error, OSError) and error.strerror:
            words += "; nothing finished is lost, run again to continue"
        fail(name, words, UNUSABLE if isinstance(error, ParamsError | Busy) else FAILED)


def ensure_prepared() -> None:
    """Bring the media and weights that prepared tables and models name and this machine lacks.

    A worker that took over the outputs of other stages has the names and not the files.
    """
    if any(path.is_file() for path in (PREPARED_MEDIA, *Path("models").glob("*/weights.json"))):
        from stages import media

        media.ensure(media.named([PREPARED_MEDIA]))


def fail(name: str, words: str, code: int = FAILED) -> None:
    """Print one sentence and raise SystemExit(code)."""
    print(f"{name}: {words}", file=sys.stderr)
    raise SystemExit(code) from None
