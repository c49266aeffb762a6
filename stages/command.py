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
PREPARED_MEDIA, HUB_MANIFEST = Path("data/prepared/media.jsonl"), Path("data/hub/manifest.jsonl")
USE_MEDIA = {"sft": PREPARED_MEDIA, "para_grpo": PREPARED_MEDIA, "evaluate": HUB_MANIFEST}


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
        if manifest := USE_MEDIA.get(name.partition("@")[0]):
            ensure_media(manifest)
        yield
    except Exception as error:  # the boundary of a process
        words = sentence(error)
        if words is None:
            raise
        if isinstance(error, OSError) and error.strerror:
            words += "; nothing finished is lost, run again to continue"
        fail(name, words, UNUSABLE if isinstance(error, ParamsError | Busy) else FAILED)


def ensure_media(manifest: Path) -> None:
    """Bring what a stage uses and this machine lacks: media of its manifest, weights that models name.

    A worker that took over the outputs of other stages has the names and not the files. Of the manifest of
    all downloads, those of benchmarks are meant.
    """
    if not manifest.is_file() and not list(Path("models").glob("*/weights.json")):
        return
    from paravt.data.published import BENCHMARK_REPOSITORIES
    from stages import media

    files = media.named([manifest])
    if manifest == HUB_MANIFEST:
        weights = set(media.named([]))
        files = [file for file in files if file.repository in BENCHMARK_REPOSITORIES or file in weights]
    media.ensure(files)


def fail(name: str, words: str, code: int = FAILED) -> None:
    """Print one sentence and raise SystemExit(code)."""
    print(f"{name}: {words}", file=sys.stderr)
    raise SystemExit(code) from None
