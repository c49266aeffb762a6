"""A video reader that can be ended: native decoders run in a child process, one answer at a time.

Decoders hang on some files, a few of them with the interpreter lock held, and no thread can be ended. So a
file is opened and read by a child. The parent waits on a socket until the time is up, then kills the child;
the next request starts another one. Requests carry all that they need (the index travels along), so the
death of a child loses nothing but the answer it owed.

    parent                                            child (`serve`)
    (operation, arguments, limit_s)   ->
                                      <-   F + pixels of one frame, as often as there are frames
                                      <-   D + result    or   E + VideoError    or   X + traceback

Children are started when first needed and kept; threads that read at the same time get one each, up to
`MAX_READERS`. A child is a plain interpreter that imports av and decord only: it never runs the caller's
main module. It ends by itself when the parent is gone, and an alarm of the kernel ends it even in a hang.
"""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
import gc
import os
from pathlib import Path
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from paravt.reading.container import VideoError, stamp_of
from paravt.reading.decoding import read
from paravt.reading.indexing import Index, build_index

START_LIMIT_S = 120.0  # of the child itself, on a machine that is very busy
LONGEST_LIMIT_S = 1e6  # what timers of the kernel can hold
ALARM_GRACE_S = 5.0
MAX_READERS = min(4, os.cpu_count() or 1)
KNOWN_FILES = 128
# glibc would raise these by itself, and then frames of many sizes leave holes: 150 MB instead of 60.
STEADY_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
ROOT = str(Path(__file__).resolve().parents[2])

_HEADER = struct.Struct("!cQ")
_FRAME, _DONE, _ERROR, _BUG = b"F", b"D", b"E", b"X"


class ReaderTimeout(Exception):
    """The reader did not answer in time; it has been ended."""


class ReaderCrash(Exception):
    """The reader died while it worked; the text says how."""


class ReaderBug(Exception):
    """The reader met an error that is no VideoError; the text is its traceback."""


def request(operation: str, arguments: tuple, limit_s: float, frames: np.ndarray | None = None) -> Any:
    """Have a reader do one thing within `limit_s` seconds, and return its result.

    The time starts when a reader is free and ready. Frames that it sends fill `frames` [n, H, W, 3] in order.
    Raises what the reader raises (VideoError), ReaderTimeout, ReaderCrash, ReaderBug.
    """
    return _pool.request(operation, arguments, min(limit_s, LONGEST_LIMIT_S), frames)


class _Reader:
    """One child process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        begin = f"import sys; sys.path.insert(0, {ROOT!r}); from paravt.reading.worker import serve; "
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{begin}serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=STEADY_MEMORY | os.environ,
            )
        self._until_s = time.monotonic() + START_LIMIT_S
        try:
            self._answer(None)
        except BaseException as error:
            self.kill()
            code = self.process.returncode
            why = f"its process ended with exit code {code}; `python -m paravt.reading.worker` shows why"
            raise RuntimeError(f"the video reader does not start: {why}") from error

    def request(self, operation: str, arguments: tuple, limit_s: float, frames: np.ndarray | None) -> Any:
        """Leaves a reader that can be asked again, or a dead one."""
        try:
            self._until_s = time.monotonic() + limit_s
            body = pickle.dumps((operation, arguments, limit_s))
            self._in_time()
            self.socket.sendall(_HEADER.pack(_DONE, len(body)) + body)
            return self._answer(frames)
        except TimeoutError as error:
            self.kill()
            raise ReaderTimeout from error
        except OSError as error:
            self.kill()
            raise ReaderCrash(f"it ended with exit code {self.process.returncode}") from error
        except (VideoError, ReaderBug):
            raise
        except BaseException:
            self.kill()  # Ctrl-C in the middle of an answer: its rest must never be read as another
            raise

    def _answer(self, frames: np.ndarray | None) -> Any:
        count = 0
        while True:
            kind, size = _HEADER.unpack(self._receive(bytearray(_HEADER.size)))
            if kind == _FRAME:
                self._receive(memoryview(frames[count]).cast("B"))
                count += 1
                continue
            body = pickle.loads(self._receive(bytearray(size)))
            if kind == _DONE:
                return body
            if kind == _ERROR:
                raise body
            raise ReaderBug(body)

    def _receive(self, buffer: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(buffer)
        while view:
            self._in_time()
            got = self.socket.recv_into(view)
            if not got:
                raise ConnectionResetError("the reader closed its socket")
            view = view[got:]
        return buffer

    def _in_time(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.socket.settimeout(left_s)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Without its parent's socket the child ends; one that does not is killed."""
        self.socket.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a dead network disk
                self.process.wait(timeout=2)


class _Pool:
    """Idle readers; the one used last is taken first, since it knows the file."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.idle: list[_Reader] = []
        self.count = 0

    def request(self, operation: str, arguments: tuple, limit_s: float, frames: np.ndarray | None) -> Any:
        reader = self._take()
        try:
            return reader.request(operation, arguments, limit_s, frames)
        finally:
            self._give(reader)

    def _take(self) -> _Reader:
        with self.changed:
            while not self.idle and self.count >= MAX_READERS:
                self.changed.wait()
            reader = self.idle.pop() if self.idle else None
            self.count += reader is None
        if reader is not None and reader.alive:
            return reader
        try:
            if reader is not None:  # ended by someone else while it was idle
                reader.close()
            return _Reader()
        except BaseException:
            self._give(None)
            raise

    def _give(self, reader: _Reader | None) -> None:
        with self.changed:
            if reader is not None and reader.alive:
                self.idle.append(reader)
            else:
                self.count -= 1
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            idle, self.idle = self.idle, []
            self.count -= len(idle)
        for reader in idle:
            reader.close()


_pool = _Pool()


def _forget() -> None:
    """A forked process must not talk to its parent's readers."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _pool.close())


# The child


def serve(descriptor: int) -> None:
    """Answer requests until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    parent_gone = (EOFError, BrokenPipeError, ConnectionResetError)
    with socket.socket(fileno=descriptor) as channel, suppress(*parent_gone):
        _send(channel, _DONE, None)
        gc.freeze()  # modules are never garbage: leaving them out makes each collection quick
        known: OrderedDict[tuple, Index] = OrderedDict()
        while True:
            _, size = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
            operation, arguments, limit_s = pickle.loads(_receive_exactly(channel, size))
            signal.setitimer(signal.ITIMER_REAL, limit_s + ALARM_GRACE_S)
            _do(channel, known, operation, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()  # an open container and its streams hold each other, with their decoders


def _do(channel: socket.socket, known: OrderedDict, operation: str, arguments: tuple) -> None:
    def send_frame(image: np.ndarray) -> None:
        channel.sendall(_HEADER.pack(_FRAME, image.nbytes))
        channel.sendall(memoryview(np.ascontiguousarray(image)).cast("B"))

    work: dict[str, Callable] = {
        "open": lambda candidates: _open(known, candidates),
        "read": lambda index, positions: read(index, positions, send_frame),
    }
    try:
        result = work[operation](*arguments)
    except VideoError as error:
        _send(channel, _ERROR, error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:  # the worker boundary: whatever it is goes to the parent
        _send(channel, _BUG, traceback.format_exc())
    else:
        _send(channel, _DONE, result)


def _open(known: OrderedDict[tuple, Index], candidates: Sequence[str]) -> Index:
    """The index of the first of `candidates` that exists; a file that has not changed is indexed once."""
    path = next((path for path in candidates if os.path.lexists(path)), candidates[0])
    key = (path, stamp_of(path))
    if key not in known:
        known[key] = build_index(path)
        if len(known) > KNOWN_FILES:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def _send(channel: socket.socket, kind: bytes, body: object) -> None:
    data = pickle.dumps(body)
    channel.sendall(_HEADER.pack(kind, len(data)) + data)


def _receive_exactly(channel: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return buffer
