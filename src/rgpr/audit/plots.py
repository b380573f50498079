"""Pictures of an evaluation; every function draws on one matplotlib Axes and returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._axes import one

__all__ = ["detection", "reliability", "risk"]


def reliability(bins: Mapping[str, Sequence[Sequence[float]]], ax: Any = None) -> Any:
    """Accuracy against confidence; an honest model is on the diagonal.

    Args:
        bins: By method, rows of mean confidence, accuracy and count.
        ax: Where to draw; a new figure by default.
    """
    ax = one(ax)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for method, rows in bins.items():
        filled = [row for row in rows if row[2] > 0]
        ax.plot([row[0] for row in filled], [row[1] for row in filled], marker="o", label=method)
    ax.set(xlabel="confidence", ylabel="accuracy", title="reliability")
    ax.legend()
    return ax


def risk(curves: Mapping[str, Sequence[float]], ax: Any = None) -> Any:
    """The share of errors among the most confident answers, against how many are answered.

    Args:
        curves: By method, that share at even coverages.
        ax: Where to draw; a new figure by default.
    """
    ax = one(ax)
    for method, curve in curves.items():
        shares = [(number + 1) / len(curve) for number in range(len(curve))]
        ax.plot(shares, curve, label=method)
    ax.set(xlabel="share of inputs that are answered", ylabel="errors among them", title="risk")
    ax.legend()
    return ax


def detection(found: Mapping[str, Mapping[str, Mapping[str, float]]], ax: Any = None) -> Any:
    """AUROC of every method for each set of outliers.

    Args:
        found: By set, method and metric.
        ax: Where to draw; a new figure by default.
    """
    ax = one(ax)
    methods = list(next(iter(found.values())))[::-1]
    for name, values in found.items():
        ax.plot([100 * values[method]["auroc"] for method in methods], methods, "o", label=name)
    ax.axvline(50, color="0.7", linewidth=1)
    ax.set(xlabel="AUROC, %", title="told from the data")
    ax.legend(fontsize="small")
    return ax
