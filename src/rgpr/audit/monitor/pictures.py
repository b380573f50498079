"""A monitor as a picture: the evidence, the layers, and the performance where there are labels."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from ..._axes import row, write
from .performance import Window
from .trace import Array

__all__ = ["Drawn", "draw"]

_LN10 = math.log(10)


@dataclass(frozen=True)
class Drawn:
    """What is drawn of a monitor.

    Attributes:
        points: Of its trace: number of the input, time, martingale of the score and of each layer.
        alpha: Its level.
        when: Number of the input that raised the alarm, if there is one.
        since: Number of the input where the drift seems to begin.
        layers: Names of the layers.
        windows: Its performance.
    """

    points: Array
    alpha: float
    when: int | None
    since: int | None
    layers: list[str]
    windows: list[Window]


def draw(drawn: Drawn, path: str | os.PathLike[str] | None) -> Any:
    """An array of matplotlib Axes: evidence, layers if there are any, performance if there is any.

    Args:
        drawn: What to draw.
        path: The file to write, if any.
    """
    panels = 1 + bool(drawn.layers) + bool(drawn.windows)
    axes = row(panels, 4.2, 3.2)
    _evidence(axes[0], drawn)
    if drawn.layers:
        _layers(axes[1], drawn)
    if drawn.windows:
        _performance(axes[-1], drawn.windows)
    write(axes[0], path, made=True)
    return axes


def _evidence(axes: Any, drawn: Drawn) -> None:
    axes.plot(drawn.points[:, 0], drawn.points[:, 2] / _LN10, color="#0072B2")
    label = f"alarm: 1/alpha = {1 / drawn.alpha:g}"
    axes.axhline(-math.log10(drawn.alpha), color="0.3", ls="--", lw=0.8, label=label)
    if drawn.when is not None:
        axes.axvline(drawn.when, color="#D55E00", label=f"alarm at input {drawn.when}")
        axes.axvline(drawn.since, color="#E69F00", ls=":", label=f"since about {drawn.since}")
    axes.set(xlabel="input", ylabel="log10 of the evidence for a drift", title="all inputs")
    axes.legend(frameon=False, fontsize=8)


def _layers(axes: Any, drawn: Drawn) -> None:
    for column, name in enumerate(drawn.layers, 3):
        axes.plot(drawn.points[:, 0], drawn.points[:, column] / _LN10, lw=1, label=name)
    limit = math.log10(len(drawn.layers) / drawn.alpha)
    axes.axhline(limit, color="0.3", ls="--", lw=0.8, label="drifted")
    axes.set(xlabel="input", ylabel="log10 of the evidence for a drift", title="each layer")
    axes.legend(frameon=False, fontsize=7)


def _performance(axes: Any, windows: list[Window]) -> None:
    middle = [(window.first + window.last) / 2 for window in windows]
    if windows[0].accuracy is not None:
        axes.plot(middle, [window.accuracy for window in windows], "o-", ms=3)
        axes.set(ylabel="accuracy", ylim=(0, 1.02))
    else:
        axes.plot(middle, [window.loss for window in windows], "o-", ms=3)
        axes.set(ylabel="mean squared error")
    axes.set(xlabel="input", title="inputs with labels")
