"""Runs commands in forks of a process of its own, and kills them; see ``killing.py``."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Killer", "killer", "room"]


class Killer:
    """The process that has imported everything.

    Args:
        limit: How many seconds it has for an answer; a command that hangs ends before by itself.
    """

    def __init__(self, limit: float = 600) -> None:
        self._limit = limit
        script = Path(__file__).with_name("killing.py")
        own = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
        )
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit)[0]:
            self._process.kill()
            raise TimeoutError(f"there was no answer in {self._limit} seconds")
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def run(
        self, command: list[str], folder: Path, after: float | None = None, user: int | None = None
    ) -> dict[str, Any]:
        """Run a command in a folder, kill it after so many seconds, and say how it ended.

        Args:
            command: The command.
            folder: The current folder.
            after: The number of seconds; it is not killed without one.
            user: The user whose permissions it has; those of the test without one.
        """
        assert self._process.stdin is not None
        asked = {"run": command, "folder": str(folder), "after": after, "user": user}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill does not care whether a disk was waited for."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
