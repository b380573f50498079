"""Line charts as plain geometry, which a template turns into SVG.

A chart lives in a box of 640 by 300 units. Points that are not finite leave a gap in their line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Line", "Tick", "line_chart"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 628.0, 12.0, 256.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis.

    Attributes:
        at: Its place in the box.
        label: The number beside it.
    """

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        name: Its name in the legend.
        path: The ``d`` of an SVG path.
        dots: For each point, its place in the box and what it says when hovered over.
        style: ``"line"`` or ``"dashed"``.
    """

    name: str
    path: str
    dots: list[tuple[float, float, str]]
    style: str = "line"


@dataclass(frozen=True)
class Chart:
    """All that is drawn.

    Attributes:
        key: A word that tells it from the other charts of a page.
        title: What it shows.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        x_ticks: Marks below.
        y_ticks: Marks on the left.
        lines: The series.
        marks: Vertical lines with their labels.
        note: A sentence below the chart.
    """

    key: str
    title: str
    x: str
    y: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    marks: list[Tick]
    note: str = ""


def line_chart(
    key: str,
    words: tuple[str, str, str, str],
    series: Mapping[str, Points],
    *,
    log: bool = False,
    dashed: Sequence[str] = (),
    marks: Mapping[str, float] | None = None,
) -> Chart:
    """A chart of several series.

    Args:
        key: A word that tells it from the other charts of a page.
        words: Title, label of each axis, and the note.
        series: Points by name.
        log: Whether the horizontal axis is logarithmic.
        dashed: Names of series that are drawn dashed.
        marks: Places on the horizontal axis that get a vertical line, by label.
    """
    finite = [p for points in series.values() for p in points if all(map(math.isfinite, p))]
    xs = [x for x, _ in finite] or [1.0]
    top = max([y for _, y in finite] or [1.0])
    high = 1.0 if 0.5 < top <= 1 else _rounded_up(top)
    low_x, high_x = min(xs), max(xs)
    if not log and 0 < low_x < high_x / 4:
        low_x = 0.0

    def across(x: float) -> float:
        a, b, c = (math.log10(v) if log else v for v in (x, low_x, high_x))
        return _LEFT + (_RIGHT - _LEFT) * ((a - b) / (c - b) if c > b else 0.5)

    def up(y: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * y / high

    lines = []
    for name, points in series.items():
        path, dots, pen = [], [], "M"
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            path.append(f"{pen}{across(x):.1f} {up(y):.1f}")
            dots.append((round(across(x), 1), round(up(y), 1), f"{name}: {y:.3g} at {x:.3g}"))
            pen = "L"
        lines.append(Line(name, " ".join(path), dots, "dashed" if name in dashed else "line"))
    title, x_label, y_label, note = words
    return Chart(
        key=key,
        title=title,
        x=x_label,
        y=y_label,
        x_ticks=[Tick(round(across(x), 1), _number(x)) for x in _ticks(low_x, high_x, log)],
        y_ticks=[Tick(round(up(high * i / 4), 1), _number(high * i / 4)) for i in range(5)],
        lines=lines,
        marks=[
            Tick(round(across(x), 1), label)
            for label, x in (marks or {}).items()
            if math.isfinite(x) and low_x <= x <= high_x
        ],
        note=note,
    )


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return [low + (high - low) * i / 4 for i in range(5)]
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = max(1, (last - first + 4) // 5)
    return [10.0**power for power in range(first, last + 1, step)]


def _rounded_up(value: float) -> float:
    """The next number of which a quarter has few digits."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 4, 8, 10) if power * digit >= value)


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
