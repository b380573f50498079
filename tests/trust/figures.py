"""The figures of a nightly run: ``python tests/trust/figures.py FOLDER`` after the tests.

Adds up what the tests of trust counted into FOLDER, writes ``results/trust/nightly.json``, and
fills the table of ``docs/trust.md``. `make nightly` and `make trust` call it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table
from rgpr_paper.units import made_with, write_json

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "trust" / "nightly.json"
PAGE = ROOT / "docs" / "trust.md"
START, END = "<!-- nightly -->\n", "<!-- end of nightly -->"


def collected(folder: Path) -> dict[str, dict[str, int]]:
    """For every area, what was tried and how often, in all tests together.

    Raises:
        ValueError: Some counts are not those of a nightly run, which tries more.
    """
    areas: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("profile") != "nightly":
            raise ValueError(
                f"{path} has counts of the profile {found.get('profile')!r}, and the page shows "
                "those of nightly runs; empty the folder and run `make nightly` or `make trust`"
            )
        counts = areas.setdefault(found["area"], {})
        for what, count in found["counts"].items():
            counts[what] = counts.get(what, 0) + count
    return areas


def table(result: dict[str, Any]) -> str:
    """The figures as the page shows them."""
    about = result["about"]
    rows = [
        [area, what, f"{count:,}".replace(",", " ")]
        for area, counts in result["areas"].items()
        for what, count in counts.items()
    ]
    made = (
        f"`make trust` of {about['date']}, {about['hardware']} and {about['cores']} cores, torch "
        f"{about['versions']['torch']}, Python {about['versions']['python']}, commit "
        f"{about['commit']}. Every case below ended as it should; one that does not fails the run."
    )
    shown = block_markdown(Table(["area", "what was tried", "cases"], rows), "")
    return "\n\n".join([made, *shown]) + "\n"


def main(folder: Path) -> None:
    try:
        areas = collected(folder)
    except ValueError as error:
        sys.exit(str(error))
    if not areas:
        sys.exit(f"{folder} holds no counts; run the tests with RGPR_TALLY={folder} first")
    result = {"about": {**made_with(), "cores": os.cpu_count()}, "areas": areas}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    write_json(RESULT, result)
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + table(result) + END + after)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
