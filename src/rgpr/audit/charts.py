"""Line charts as plain geometry, which a template turns into SVG.

A chart lives in a box of 640 by 288 units, with a band above the lines for the labels of marks.
Points that are not finite leave a gap in their line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .passes import BASE, NETWORK, OURS

__all__ = ["Chart", "Dot", "Line", "Tick", "line_chart"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 628.0, 30.0, 256.0
# Every method has one colour in all charts; other lines take those that are left.
_COLOURS = {NETWORK: 0, OURS: 1, BASE: 2}
_OTHERS = (4, 3)
# The radius of a dot that stands for all answers, and the least one.
_LARGEST, _LEAST = 12.0, 2.5

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
class Dot:
    """One point of a line.

    Attributes:
        x: Its place in the box.
        y: Likewise.
        says: What it says when hovered over.
        radius: How large it is.
        shown: Whether it is seen without hovering.
    """

    x: float
    y: float
    says: str
    radius: float = 5.0
    shown: bool = False


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        name: Its name in the legend.
        path: The ``d`` of an SVG path.
        dots: Its points.
        colour: The number of its colour, 0 to 4.
        style: ``"line"`` or ``"dashed"``.
    """

    name: str
    path: str
    dots: list[Dot]
    colour: int
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
        note: A sentence below the chart, or in its place where there are no lines.
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
    log_y: bool = False,
    counts: Mapping[str, Sequence[float]] | None = None,
    dashed: Sequence[str] = (),
    marks: Mapping[str, float] | None = None,
) -> Chart:
    """A chart of several series.

    Args:
        key: A word that tells it from the other charts of a page.
        words: Title, label of each axis, and the note.
        series: Points by name.
        log: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is.
        counts: How many answers each point stands for, by name of the series; such points are drawn
            as dots whose areas are in proportion.
        dashed: Names of series that are drawn dashed.
        marks: Places on the horizontal axis that get a vertical line, by label.
    """
    usable = partial(_usable, log_y=log_y)
    finite = [p for points in series.values() for p in points if usable(p)]
    xs = [x for x, _ in finite] or [1.0]
    top = max([y for _, y in finite] or [1.0])
    low, high = 0.0, 1.0 if 0.5 < top <= 1 else _rounded_up(top)
    if log_y:
        low = _power(math.floor, min([y for _, y in finite] or [1.0]))
        high = max(10 * low, _power(math.ceil, top))
    low_x, high_x = min(xs), max(xs)
    if not log and 0 < low_x < high_x / 4:
        low_x = 0.0

    def across(x: float) -> float:
        a, b, c = (math.log10(v) if log else v for v in (x, low_x, high_x))
        return _LEFT + (_RIGHT - _LEFT) * ((a - b) / (c - b) if c > b else 0.5)

    def up(y: float) -> float:
        a, b, c = (math.log10(v) if log_y else v for v in (y, low, high))
        return _BOTTOM - (_BOTTOM - _TOP) * ((a - b) / (c - b) if c > b else 0.5)

    largest = max((n for each in (counts or {}).values() for n in each), default=1.0)

    lines, others = [], iter(_OTHERS)
    for name, points in series.items():
        path, dots, pen = [], [], "M"
        shown = (counts or {}).get(name)
        for number, (x, y) in enumerate(points):
            if not usable((x, y)):
                pen = "M"
                continue
            path.append(f"{pen}{across(x):.1f} {up(y):.1f}")
            dot = Dot(round(across(x), 1), round(up(y), 1), f"{name}: {y:.3g} at {x:.3g}")
            if shown is not None:
                radius = max(_LEAST, _LARGEST * (shown[number] / largest) ** 0.5)
                says = f"{dot.says}, {shown[number]:.0f} answers"
                dot = replace(dot, says=says, radius=round(radius, 1), shown=True)
            dots.append(dot)
            pen = "L"
        colour = _COLOURS[name] if name in _COLOURS else next(others, _OTHERS[-1])
        style = "dashed" if name in dashed else "line"
        lines.append(Line(name, " ".join(path), dots, colour, style))
    heights = _ticks(low, high, True) if log_y else [high * i / 4 for i in range(5)]
    title, x_label, y_label, note = words
    return Chart(
        key=key,
        title=title,
        x=x_label,
        y=y_label,
        x_ticks=[Tick(round(across(x), 1), _number(x)) for x in _ticks(low_x, high_x, log)],
        y_ticks=[Tick(round(up(y), 1), _number(y)) for y in heights],
        lines=lines,
        marks=[
            Tick(round(across(x), 1), label)
            for label, x in (marks or {}).items()
            if math.isfinite(x) and low_x <= x <= high_x
        ],
        note=note,
    )


def _usable(point: tuple[float, float], *, log_y: bool) -> bool:
    return all(map(math.isfinite, point)) and (point[1] > 0 or not log_y)


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


def _power(rounded: Callable[[float], int], value: float) -> float:
    """The power of ten below or above a value."""
    return float(10.0 ** rounded(math.log10(value)))


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
