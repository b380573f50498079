"""Guards of a test: little memory beside what the process has, and nothing that hangs."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = [
    "FOR_EVER",
    "end_if_it_hangs",
    "ended",
    "joined",
    "little_memory",
    "no_hang",
    "untraced_fork",
]
FOR_EVER = 300  # seconds, of which what is waited for takes a few at most


class HangsError(BaseException):
    """What was tried did not come to its end; no handler of the library's catches this."""


@contextmanager
def little_memory(more: int = 1 << 30) -> Iterator[None]:
    """Let an allocation fail that needs more than so many bytes beside what there is.

    How much there is can be read from ``/proc`` alone; a system without it, such as macOS, sets no
    limit.
    """
    taken = Path("/proc/self/statm")
    if not taken.exists():
        yield
        return
    pages = int(taken.read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def no_hang(seconds: int = 60) -> Iterator[None]:
    """Raise where something takes a thousand times as long as it should."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangsError(f"it did not end in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def end_if_it_hangs() -> None:
    """Let a forked child that waits for ever end by a signal, whatever its parent's handler did."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FOR_EVER)


def untraced_fork() -> int:
    """Fork a child whose steps are not traced.

    Coverage writes down every file that it sees for the first time under a lock of its own. A child
    that was forked while another thread held this lock would wait for it for ever.
    """
    trace = sys.gettrace()
    sys.settrace(None)
    child = os.fork()
    if child:
        sys.settrace(trace)
    return child


def ended(child: int) -> int:
    """Wait for a forked child and return its status; end one that hangs before it sets an alarm."""
    patience = threading.Timer(FOR_EVER, os.kill, (child, signal.SIGKILL))
    patience.daemon = True
    patience.start()
    try:
        return os.waitpid(child, 0)[1]
    finally:
        patience.cancel()


def joined(workers: list[threading.Thread]) -> None:
    """Wait for threads, which have to be daemons, as others would keep the process from ending."""
    for worker in workers:
        worker.join(FOR_EVER)
        assert not worker.is_alive(), f"{worker.name} did not end in {FOR_EVER} seconds"
