"""A run of a monitor over much data that may be killed, kept beside the state it started from.

Beside ``watch.safetensors`` there is ``watch.safetensors.part`` while a run lasts: a whole monitor,
the number of rows that it has read, and all that the run depends on. It is written wholly or not at
all. When the run is finished the part takes the place of the state, in one step, so the state only
ever holds whole runs. A run that was killed is taken up from the part if it depends on the same,
and refused if it does not; the rows that the part has read are skipped. As a monitor is kept to the
last bit, the end is the same as without the kill.

The state still says of which run it was the part. So if a run was killed or failed after that step
and the same run is started again, its rows are known to be in the state and are not read twice.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._atomic import put_in_place
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
        before: How many inputs the monitor had read when the run began.
        finished: Whether the state holds all of the run.
    """

    def __init__(
        self, state: Path, settings: Mapping[str, Any], every: float, *, restart: bool = False
    ) -> None:
        self.rows, self.before, self.finished = 0, 0, False
        self._state, self._path = state, state.with_name(f"{state.name}.part")
        if restart:
            self._path.unlink(missing_ok=True)
        start = hashlib.sha256(state.read_bytes()).hexdigest() if state.exists() else None
        self._settings = json.loads(json.dumps({**settings, "state": start}))
        self._every, self._written = every, time.monotonic()

    def begun(self, model: RGPR) -> Monitor | None:
        """The monitor to go on with, from the part or the state; ``None`` if there is neither.

        Raises:
            ValueError: The part is of a run with other settings.
        """
        run = files.run_of(self._path) if self._path.is_file() else None
        if run is not None:
            check_same(self._path, run["settings"], self._settings)
            self.rows, self.before = run["rows"], run["before"]
            return Monitor.load(self._path, model)
        if not self._state.exists():
            return None
        monitor = Monitor.load(self._state, model)
        run = files.run_of(self._state)
        # The run that the state holds began with the state before it.
        if run is not None and {**self._settings, "state": None} == {
            **run["settings"],
            "state": None,
        }:
            self.rows, self.before, self.finished = run["rows"], run["before"], True
        else:
            self.before = monitor.count
        return monitor

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
        run = {"settings": self._settings, "rows": self.rows, "before": self.before}
        files.save(self._path, monitor._parts(), run)
        self._written = time.monotonic()

    def finish(self, monitor: Monitor) -> None:
        """Put the part, with all of the run, in the place of the state."""
        self.write(monitor)
        put_in_place(self._path, self._state)
