"""The numbers that the paper printed, one JSON file for each table and figure that carries some.

A file is a list of cells and what is needed to read them::

    label    in the paper's source, such as "tab:ood_avg"
    kind     "table" or "figure"
    title, caption, remarks     in our words; remarks say what in the paper does not fit
    runs     how many runs the numbers average, null where that is not known
    error    "standard error", "standard deviation", or null where none is printed
    rows, columns     names of the axes, as the paper lays them out
    axes     every axis with its places in order; "metric" is always one of them
    metrics  for each metric its unit, which direction is better, and the decimals printed
    cells    a place on every axis, then value, error (or null) and whether it is bold

``in`` is the set trained on and ``out`` the set predicted on; where they are the same it is the
set's own test data. Methods and metrics have one name in all files (``TS``, ``DE``, ``FPR95``),
whatever each table calls them. What the paper marks as not applicable has no cell.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

__all__ = ["published", "published_names"]

_FOLDER = files(__package__) / "published"


def published_names() -> list[str]:
    """The tables and figures there are, in alphabetical order."""
    return sorted(
        path.name.removesuffix(".json") for path in _FOLDER.iterdir() if path.name.endswith(".json")
    )


def published(name: str) -> dict[str, Any]:
    """One table or figure of the paper; the module says what is in it.

    >>> table = published("ood_avg")
    >>> table["metrics"]["FPR95"]["unit"], table["runs"]
    ('percent', 5)
    >>> table["cells"][0]
    {'in': 'MNIST', 'method': 'MAP', 'metric': 'FPR95', 'value': 28.2, 'error': None, 'bold': False}

    Raises:
        ValueError: The paper has no such table or figure; lists those there are.
    """
    if name not in published_names():
        raise ValueError(
            f"the paper has no numbers named '{name}'; there are {', '.join(published_names())}"
        )
    table: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return table
