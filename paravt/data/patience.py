"""Asking the hub with patience, and one clear sentence for what another try does not mend.

A busy hub (429, 5xx) is waited for as long as it asks; a lost connection is tried again, with growing pauses.
Tries are counted from the last one that got further, so a slow line that moves is never given up.
"""

from __future__ import annotations

from collections.abc import Callable
import errno
import logging
from pathlib import Path
import random
import threading
from typing import TypeVar

log = logging.getLogger("paravt")

TRIES = 6
BUSY = (408, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 300.0
Value = TypeVar("Value")


class HubError(RuntimeError):
    """A download that cannot go on; one sentence that says what to do."""


class Patience:
    """How `endpoint` is asked, and as whom. `root` is where downloads go; pauses grow from `wait_s`."""

    def __init__(self, endpoint: str, token: str | None, root: Path, wait_s: float) -> None:
        self.endpoint, self.token, self.root, self.wait_s = endpoint, token, root, wait_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the transfers that other threads have under way; what they brought is kept."""
        self._stopped.set()

    def patiently(
        self,
        call: Callable[[], Value],
        what: str,
        kind: str = "dataset",
        position: Callable[[], int] = lambda: 0,
    ) -> Value:
        """The value of `call`, tried again after faults of the network or a busy hub.

        The hub's Retry-After is waited for. Tries are counted from the last one that got further.
        Raises HubError for what another try does not mend; "not found" errors pass through.
        """
        import httpx2
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        tries, reached = 0, position()
        while True:
            wait_s = 0.0
            try:
                return call()
            except GatedRepoError as error:
                raise HubError(self.gate(what.partition(":")[0], kind)) from error
            except EntryNotFoundError as error:
                raise HubError(f"{what} is not on {self.endpoint} any more; check its revision") from error
            except (RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status not in BUSY:
                    raise HubError(self._refused(status, what, error)) from error
                wait_s, fault = _asked_wait_s(error), f"the hub answered {status}"
            except httpx2.TransportError as error:
                fault = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
            except OSError as error:
                if error.errno is not None:
                    raise HubError(self._disk(error, what)) from error
                fault = "the connection ended early"
            tries = 1 if position() > reached else tries + 1
            reached = max(reached, position())
            if tries >= TRIES:
                raise HubError(
                    f"{what}: {fault}, {tries} times in a row; what is downloaded is kept, run again to go on"
                )
            if self._stopped.is_set():
                raise HubError(f"{what}: stopped; what is downloaded is kept, run again to go on")
            pause_s = max(wait_s, self.wait_s * min(2**tries, 60) * random.uniform(0.5, 1.0))
            log.warning("%s: %s; trying again in %.1f s", what, fault, pause_s)
            self._stopped.wait(pause_s)

    def gate(self, repository: str, kind: str) -> str:
        """What to do about a gated repository."""
        page = f"{self.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repository}"
        if self.token:
            return f"{repository} is gated and the token in use has no access; accept its terms at {page}"
        return (
            f"{repository} is gated; accept its terms at {page}, then set HF_TOKEN to a token of that account"
        )

    def _refused(self, status: int, what: str, error: Exception) -> str:
        if status in (401, 403):
            token = "the token in use is not valid for it" if self.token else "it needs a token"
            return f"{what}: {token}; set HF_TOKEN to one made at {self.endpoint}/settings/tokens"
        return f"{what}: the hub answered {status} ({str(error).splitlines()[0]})"

    def _disk(self, error: OSError, what: str) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else error.strerror or str(error)
        return f"{what}: {reason} under {self.root}; what is downloaded is kept, make room and run again"


def _asked_wait_s(error: Exception) -> float:
    """The seconds that an answer's Retry-After or rate limit asks for, at most five minutes."""
    from huggingface_hub.utils import parse_ratelimit_headers

    headers = getattr(getattr(error, "response", None), "headers", {})
    try:
        asked = float(headers.get("Retry-After", ""))
    except ValueError:
        limit = parse_ratelimit_headers(headers)
        asked = float(limit.reset_in_seconds) if limit else 0.0
    return min(max(asked, 0.0), LONGEST_WAIT_S)
