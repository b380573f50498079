"""A run of a monitor over much data that may be killed, kept beside the state it started from.

Beside ``watch.safetensors`` there is ``watch.safetensors.part`` while a run lasts: a whole monitor,
the number of rows that it has read, and all that the run depends on. It is written wholly or not at
all. The state itself is written when the run is finished, so it only ever holds whole runs. A run
that was killed is taken up from the part if it depends on the same, and refused if it does not; the
rows that the part has read are skipped. As a monitor is kept to the last bit, the end is the same
as without the kill.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._resuming import check_same
from ...model import RGPR
from . import files
from .monitor import Monitor

__all__ = ["Unfinished"]


class Unfinished:
    """The part of a run that is done.

    Args:
        state: The file that the run starts from, if it is there, and is written to at its end.
        settings: All that the run depends on, for JSON.
        every: Seconds between writes.
        restart: Throw away what another run left.

    Attributes:
        rows: How many rows of the data were read.
    """

    def __init__(
        self, state: Path, settings: Mapping[str, Any], every: float, *, restart: bool = False
    ) -> None:
        self.rows = 0
        self._path = state.with_name(f"{state.name}.part")
        if restart:
            self._path.unlink(missing_ok=True)
        start = hashlib.sha256(state.read_bytes()).hexdigest() if state.exists() else None
        self._settings = json.loads(json.dumps({**settings, "state": start}))
        self._every, self._written = every, time.monotonic()

    def taken_up(self, model: RGPR) -> Monitor | None:
        """The monitor of a run with these settings that was stopped; ``None`` if there is none.

        Raises:
            ValueError: It had other settings.
        """
        run = files.run_of(self._path) if self._path.is_file() else None
        if run is None:
            return None
        check_same(self._path, run["settings"], self._settings)
        self.rows = run["rows"]
        return Monitor.load(self._path, model)

    def read(self, monitor: Monitor, rows: int, *, now: bool = False) -> None:
        """Note that the monitor has read so many more rows, and write that once in a while.

        Args:
            monitor: With these rows.
            rows: How many.
            now: Write at once.
        """
        self.rows += rows
        if now or time.monotonic() - self._written >= self._every:
            self.write(monitor)

    def write(self, monitor: Monitor) -> None:
        """Write what is done."""
        run = {"settings": self._settings, "rows": self.rows}
        files.save(self._path, monitor._parts(), run)
        self._written = time.monotonic()

    def finish(self) -> None:
        """Remove the part, once the state holds all of the run."""
        self._path.unlink(missing_ok=True)
