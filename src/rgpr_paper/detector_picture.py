"""A picture of many detectors: near against far AUROC, a panel for each set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .figures import COLORS, drawing
from .section import Figure

__all__ = ["picture"]

Points = Mapping[str, tuple[float, float]]
_STEP = 0.027  # height of a small label, as a share of the panel's


def picture(folder: Path, sets: Mapping[str, Points], ours: set[str]) -> Figure:
    """Draw ``openood.png`` and ``openood.svg``.

    Args:
        folder: Where to.
        sets: For each set the near and far AUROC of every detector, in %.
        ours: Names of the detectors that are marked.
    """
    columns = min(2, len(sets))
    rows = -(-len(sets) // columns)
    caption = (
        "Near AUROC against far AUROC of every detector, means over seeds, in %. This library's "
        "are marked. Detectors far behind the others stand at the edge."
    )
    size = (5.2 * columns, 4.4 * rows)
    with drawing(
        folder, "openood", caption, nrows=rows, ncols=columns, figsize=size, squeeze=False
    ) as (_, axes, block):
        for axis, (title, points) in zip(axes.flat, sets.items(), strict=False):
            _panel(axis, points, ours)
            axis.set(title=title, xlabel="far AUROC, %", ylabel="near AUROC, %")
        for axis in axes.flat[len(sets) :]:
            axis.axis("off")
    return block


def _panel(axis: Any, points: Points, ours: set[str]) -> None:
    # A detector far behind would squeeze all others into a corner; it stands at the edge instead.
    spans = [_span([point[i] for point in points.values()]) for i in (1, 0)]
    places = {d: (max(p[1], spans[0][0]), max(p[0], spans[1][0])) for d, p in points.items()}
    (left, right), (bottom, top) = spans
    axis.set_xlim(left - 0.15 * (right - left), right + 0.25 * (right - left))
    axis.set_ylim(bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom))
    axis.set_xticks([tick for tick in axis.get_xticks() if tick <= 100.001])
    for marked in (False, True):
        shown = [place for d, place in places.items() if (d in ours) == marked]
        style = {"s": 46, "marker": "*"} if marked else {"s": 11}
        if shown:
            x, y = zip(*shown, strict=True)
            axis.scatter(x, y, zorder=3, color=COLORS[1 if marked else 7], **style)
    _labels(axis, places, ours)


def _span(values: list[float]) -> tuple[float, float]:
    """From the worst value that is not far behind the middle one, to the best."""
    ordered = sorted(values)
    best, middle = ordered[-1], ordered[len(ordered) // 2]
    low = max(ordered[0], middle - max(2 * (best - middle), 1.0))
    return low, max(best, low + 0.5)


def _labels(axis: Any, places: Mapping[str, tuple[float, float]], ours: set[str]) -> None:
    """Write names beside points, each at the nearest place where it covers nothing."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    at = {
        d: ((x - left) / (right - left), (y - bottom) / (top - bottom))
        for d, (x, y) in places.items()
    }
    taken = [_Box(x - 0.008, x + 0.008, y, 0.5) for x, y in at.values()]
    for detector in sorted(at, key=lambda d: (d not in ours, -at[d][1])):
        x, y = at[detector]
        mark = detector in ours
        size = 7.5 if mark else 5.5
        width = 0.01 + 0.0105 * len(detector) * size / 5.5
        box = min(
            (box for box in _around(x, y, width) if not any(map(box.covers, taken))),
            key=lambda box: abs(box.y - y) + 0.4 * box.beside(x),
            default=_Box(x + 0.015, x + 0.015 + width, y),
        )
        taken.append(box)
        colour = COLORS[1] if mark else "#444444"
        axis.text(
            box.left,
            box.y,
            detector,
            transform=axis.transAxes,
            fontsize=size,
            fontweight="bold" if mark else "normal",
            color=colour,
            va="center",
        )
        if abs(box.y - y) > _STEP / 2 or box.beside(x) > 0.03:
            edge = box.left if box.left > x else box.right
            axis.plot(
                [x, edge], [y, box.y], transform=axis.transAxes, linewidth=0.3, color="#aaaaaa"
            )


@dataclass(frozen=True)
class _Box:
    """Where a label is, in shares of the panel; ``tall`` is its height in lines."""

    left: float
    right: float
    y: float
    tall: float = 1.0

    def beside(self, x: float) -> float:
        """How far the label is from a point, along the panel's width."""
        return self.left - x if self.left > x else x - self.right

    def covers(self, other: _Box) -> bool:
        """Whether the two overlap."""
        apart = _STEP * (self.tall + other.tall) / 2
        return abs(self.y - other.y) < apart and self.left < other.right and other.left < self.right


def _around(x: float, y: float, width: float) -> Iterator[_Box]:
    """Places for a label on both sides of a point, inside of the panel."""
    for step in range(-60, 61):
        height = y + step * _STEP / 4
        for shift in (0.015, 0.06, 0.12, 0.2, -0.015, -0.06, -0.12, -0.2):
            start = x + shift if shift > 0 else x + shift - width
            if 0.01 < height < 0.99 and start > 0.01 and start + width < 1.02:
                yield _Box(start, start + width, height)
