"""What long jobs share whose runs may be stopped and go on: one process, the same settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["alone", "check_same", "digest"]


def digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def alone(lock: Path, what: Path, option: str) -> Iterator[None]:
    """Refuse a second process; what a killed process held is free again.

    The file of the lock stays. If it were removed, a process that had opened it before and one
    that makes it anew would each hold a lock.

    Args:
        lock: A file for the lock, in a folder that is there.
        what: What is written, for the error.
        option: The option that names it.

    Raises:
        ValueError: Another process holds the lock.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {what}; wait for it, or name another {option}"
            ) from None
        yield


def check_same(
    begun: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    remedy: str = "Run it as before to go on, or pass --restart to throw it away",
) -> None:
    """Refuse to go on with a run that had other settings.

    Args:
        begun: Where the beginning of that run is kept.
        before: Its settings.
        now: The settings of this run.
        remedy: What to do, for the error.

    Raises:
        ValueError: Some differ; the error names them.
    """
    names = [*before, *(name for name in now if name not in before)]
    changes = [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise ValueError(
            f"{begun} holds the beginning of another run: {'; '.join(changes)}. {remedy}"
        )
