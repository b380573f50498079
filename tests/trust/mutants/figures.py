"""The counts of ``make mutants`` as ``docs/trust.md`` shows them.

``PYTHONPATH=tests python -m trust.mutants.figures`` fills the page anew from the result that is
there, without trying anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["END", "PAGE", "RESULT", "ROOT", "START", "fill", "table"]

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "results" / "trust" / "mutants.json"
PAGE = ROOT / "docs" / "trust.md"
START, END = "<!-- mutants -->\n", "<!-- end of mutants -->"


def table(result: dict[str, Any]) -> str:
    """A row for each group, and what the run was made with."""
    from rgpr_paper.report import block_markdown
    from rgpr_paper.section import Table

    about = result["about"]
    rows = []
    for name, group in result["groups"].items():
        noticed = group["killed"] + group["timed out"]
        rows.append(
            [
                name,
                str(group["made"]),
                str(group["tried"]),
                str(group["killed"]),
                str(group["timed out"]),
                str(group["survived"]),
                f"{noticed / group['tried']:.1%}",
            ]
        )
    made = (
        f"`make mutants` of {about['date']}, {about['hardware']} and {about['cores']} cores, torch "
        f"{about['versions']['torch']}, Python {about['versions']['python']}, mutmut "
        f"{about['versions']['mutmut']}, commit {about['commit']}."
    )
    columns = ["group", "made", "tried", "killed", "timed out", "survived", "noticed"]
    return "\n\n".join([made, *block_markdown(Table(columns, rows), "")]) + "\n"


def fill(page: Path, result: dict[str, Any]) -> None:
    """Put the table between its marks, where a page has them."""
    before, mark, rest = page.read_text().partition(START)
    if mark:
        _, end, after = rest.partition(END)
        page.write_text(before + mark + table(result) + end + after)


if __name__ == "__main__":
    fill(PAGE, json.loads(RESULT.read_text()))
