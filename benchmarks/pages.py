"""Parts of the documentation that are made of stored results, between two comments of a page."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RESULTS", "fill", "shown"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "benchmarks"


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
