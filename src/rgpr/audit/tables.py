"""Tables of a report: cells as text, RGPR first, and the best value of a comparison marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .evaluate import DETECTION, Evaluation
from .findings import Threshold
from .passes import OURS

__all__ = ["Cell", "Table", "answers", "detection", "levels"]

# Metrics of which more is better; of coverage neither more nor less is.
_MORE = ("accuracy", "auroc", "aupr in", "aupr out")
_NEITHER = ("covered",)


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes:
        text: As it is shown.
        best: Whether no other method has a better one, and some have a worse one.
    """

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows with names.

    Attributes:
        head: Names of the columns, that of the rows' names first.
        rows: Name and cells of each row.
    """

    head: list[str]
    rows: list[tuple[str, list[Cell]]]


def answers(evaluation: Evaluation) -> Table:
    """A row for each metric of the test data, and a column for each method."""
    found = _ours_first(evaluation.answers)
    rows = []
    for metric in dict.fromkeys(name for values in found.values() for name in values):
        values = [each.get(metric) for each in found.values()]
        rows.append((metric, _compared(values, metric, "{:.4g}")))
    return Table(["test data", *found], rows)


def detection(methods: Mapping[str, Mapping[str, float]]) -> Table:
    """A row for each method, and a column for each metric in per cent."""
    found = _ours_first(methods)
    columns = [
        _compared([100 * values[metric] for values in found.values()], metric, "{:.1f}")
        for metric in DETECTION
    ]
    rows = [list(cells) for cells in zip(*columns, strict=True)]
    return Table(["", *DETECTION], list(zip(found, rows, strict=True)))


def levels(thresholds: Sequence[Threshold]) -> Table:
    """A row for each set, and a column for each level."""
    rows = [("score above", [Cell(f"{row.score:.3f}") for row in thresholds])]
    for name in thresholds[0].shares:
        rows.append((name, [Cell(f"{100 * row.shares[name]:.1f} %") for row in thresholds]))
    return Table(["level", *(f"{100 * row.alpha:g} %" for row in thresholds)], rows)


def _ours_first(
    methods: Mapping[str, Mapping[str, float]],
) -> dict[str, Mapping[str, float]]:
    """The score first, then what else is ours, then the others as they come."""
    rank = {f"{OURS}, score": 0, OURS: 0, f"{OURS}, confidence": 1, f"{OURS}, variance": 1}
    return {name: methods[name] for name in sorted(methods, key=lambda name: rank.get(name, 2))}


def _compared(values: Sequence[float | None], metric: str, form: str) -> list[Cell]:
    """Cells of one metric; the best are those that look as the best does."""
    texts = ["" if value is None else form.format(value) for value in values]
    known = [value for value in values if value is not None]
    best = form.format((max if metric in _MORE else min)(known))
    differ = len({text for text in texts if text}) > 1 and metric not in _NEITHER
    return [Cell(text, differ and text == best) for text in texts]
