"""A monitor as a picture: the evidence, the layers, and the performance where there are labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .monitor import Monitor

__all__ = ["draw"]

_LN10 = math.log(10)


def draw(monitor: Monitor) -> Any:
    """An array of matplotlib Axes: evidence, layers if there are any, performance if there is any.

    Args:
        monitor: What to draw.
    """
    from matplotlib.figure import Figure

    windows = monitor.performance
    panels = 1 + bool(monitor.layers) + bool(windows)
    figure = Figure(figsize=(4.2 * panels, 3.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    points = monitor._trace.points
    _evidence(axes[0], monitor, points)
    if monitor.layers:
        _layers(axes[1], monitor, points)
    if windows:
        _performance(axes[-1], windows)
    return axes


def _evidence(axes: Any, monitor: Monitor, points: Any) -> None:
    axes.plot(points[:, 0], points[:, 2] / _LN10, color="#0072B2")
    limit = -math.log10(monitor.alpha)
    axes.axhline(limit, color="0.3", ls="--", lw=0.8, label=f"alarm: 1/alpha = {1 / monitor.alpha:g}")
    if monitor.alarm:
        axes.axvline(monitor.when, color="#D55E00", label=f"alarm at input {monitor.when}")
        axes.axvline(monitor.since, color="#E69F00", ls=":", label=f"since about {monitor.since}")
    axes.set(xlabel="input", ylabel="log10 of the martingale", title="all inputs")
    axes.legend(frameon=False, fontsize=8)


def _layers(axes: Any, monitor: Monitor, points: Any) -> None:
    names = monitor.layer_names
    for column, name in enumerate(names):
        axes.plot(points[:, 0], points[:, 3 + column] / _LN10, lw=1, label=name)
    limit = math.log10(len(names) / monitor.alpha)
    axes.axhline(limit, color="0.3", ls="--", lw=0.8, label="drifted")
    axes.set(xlabel="input", ylabel="log10 of the martingale", title="each layer")
    axes.legend(frameon=False, fontsize=7)


def _performance(axes: Any, windows: Any) -> None:
    middle = [(window.first + window.last) / 2 for window in windows]
    if windows[0].accuracy is not None:
        axes.plot(middle, [window.accuracy for window in windows], "o-", ms=3)
        axes.set(ylabel="accuracy", ylim=(0, 1.02))
    else:
        axes.plot(middle, [window.loss for window in windows], "o-", ms=3)
        axes.set(ylabel="mean squared error")
    axes.set(xlabel="input", title="inputs with labels")
