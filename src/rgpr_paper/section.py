"""What an experiment shows: text, tables and figures, and the claims that were measured.

:mod:`rgpr_paper.report` turns a section into Markdown and HTML. Text is plain; single words can be
put in backticks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from .published import published
from .units import Unit

__all__ = [
    "Block",
    "Claim",
    "Figure",
    "Section",
    "Table",
    "Text",
    "beside",
    "printed",
    "provenance",
    "spread",
]


@dataclass(frozen=True)
class Text:
    """A paragraph, or a block of code such as a command."""

    text: str
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as they are to be shown; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"row {list(row)} does not fit the head {list(self.head)}")


@dataclass(frozen=True)
class Figure:
    """A picture that is in the experiment's folder as ``NAME.png`` and ``NAME.svg``."""

    name: str
    caption: str


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or one of this library, measured.

    Attributes:
        statement: The sentence that is claimed.
        measured: The numbers that decide whether it holds.
        holds: Whether the numbers agree with the statement.
        discussion: The reason why it does not hold, or a remark for its reader.
        ours: Whether this library claims it, and not the paper.
    """

    statement: str
    measured: str
    holds: bool
    discussion: str = ""
    ours: bool = False


Block = Text | Table | Figure


@dataclass
class Section:
    """What an experiment shows, in order; claims come last."""

    blocks: list[Block] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        self.blocks += blocks


def spread(values: Iterable[float | None], digits: int, factor: float = 1.0) -> str:
    """The mean over seeds, and after ± the standard deviation between them, as a cell."""
    numbers = list(values)
    if not numbers or any(number is None for number in numbers):
        return "-" if not numbers else "inf"
    known = [factor * number for number in numbers if number is not None]
    text = f"{mean(known):.{digits}f}"
    return f"{text} ± {stdev(known):.{digits}f}" if len(known) > 1 else text


def beside(ours: str, paper: float | str | None) -> str:
    """A cell with our number and, in parentheses, the one that the paper printed."""
    return ours if paper is None else f"{ours} (paper: {paper})"


def printed(table: str, **place: str) -> float | None:
    """What the paper printed at a place of one of its tables; ``None`` where it has no cell.

    >>> printed("ood_avg", **{"in": "MNIST"}, method="LLL", metric="FPR95")
    24.8
    """
    for cell in published(table)["cells"]:
        if all(cell[axis] == name for axis, name in place.items()):
            return float(cell["value"])
    return None


def provenance(units: Sequence[Unit]) -> list[Block]:
    """When, on what and by which commands these units were made."""
    blocks: list[Block] = []
    for unit in units:
        about = unit.about
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        commit = f"commit {about['commit']}" if about.get("commit") else "an unknown commit"
        changed = " with changes" if about.get("clean") is False else ""
        made = Text(
            f"Made on {about['date']} on {about['hardware']}; {versions}; {commit}{changed}; by"
        )
        if made not in blocks or Text(about["command"], code=True) not in blocks:
            blocks += [made, Text(about["command"], code=True)]
    if any(unit.settings["small"] for unit in units):
        blocks.append(Text("These are numbers of a small version: they show that the code runs."))
    return blocks
