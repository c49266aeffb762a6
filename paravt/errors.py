"""Which errors are sentences for a person, and which are faults of the program.

An error speaks for itself if it is one of the project's own classes, if the project's code raised it as a
ValueError or RuntimeError with words, or if the system said that a file or the disk is the matter. Everything
else is a bug: it keeps its traceback.
"""

from __future__ import annotations

from types import TracebackType

OWN = ("paravt", "stages", "flows", "__main__")  # a stage is run as __main__


def sentence(error: BaseException) -> str | None:
    """What to tell a person, on one line; None for a fault of the program."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    own = _ours(type(error).__module__)
    worded = isinstance(error, ValueError | RuntimeError) and _ours(_raised_in(error.__traceback__))
    if own or worded or isinstance(error, OSError):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _ours(module: str) -> bool:
    return module.partition(".")[0] in OWN


def _raised_in(traceback: TracebackType | None) -> str:
    """The module of the frame that raised."""
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_globals.get("__name__", "")
