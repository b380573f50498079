"""Parts of the documentation that are made of stored results, between two comments of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "devices", "fill", "made", "measured", "shown"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "benchmarks"


def devices(benchmark: str) -> list[str]:
    """The devices on which a benchmark was run."""
    known = sorted({path.stem.partition("-")[0] for path in RESULTS.glob("*.json")})
    return [device for device in known if benchmark in measured(device, benchmark)]


def measured(device: str, benchmark: str) -> dict[str, Any]:
    """What was measured on a device, when, and on what.

    All benchmarks of one run are in ``DEVICE.json``. One that was run alone later is in
    ``DEVICE-BENCHMARK.json``.
    """
    alone, together = RESULTS / f"{device}-{benchmark}.json", RESULTS / f"{device}.json"
    path = alone if alone.exists() else together
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def made(found: dict[str, Any], benchmark: str) -> str:
    """By which command, when, on what and from which commit a benchmark was made."""
    machine, about = found["machine"], found.get("made", {}).get(benchmark, {})
    commit = f", commit {about['commit']}" if "commit" in about else ""
    if commit and not about.get("clean", True):
        commit += " with changes"
    return (
        f"`python -m benchmarks {benchmark}` of {about.get('date', machine['date'])}: "
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}{commit}"
    )


def shown(page: str, name: str) -> str:
    """What a page of ``docs`` has between ``<!-- name -->`` and ``<!-- end of name -->``."""
    return _cut(page, name)[1]


def fill(page: str, name: str, text: str) -> None:
    """Put a text there instead."""
    before, _, after = _cut(page, name)
    (ROOT / "docs" / page).write_text(before + text + after)


def _cut(page: str, name: str) -> tuple[str, str, str]:
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = (ROOT / "docs" / page).read_text().partition(start)
    inside, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"docs/{page} has no part between {start.strip()} and {end}")
    return before + start, inside, end + after
