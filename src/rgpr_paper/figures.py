"""Pictures in one style, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rgpr._atomic import replacing

from .section import Figure

__all__ = ["COLORS", "METHOD_COLORS", "between", "drawing", "panels"]

# Okabe and Ito's, which the colour-blind can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

# The same method has the same colour in every picture.
METHOD_COLORS = {
    "MAP": "#999999",
    "TS": "#E69F00",
    "DE": "#56B4E9",
    "GP-DSCS": "#CC79A7",
    "LLL": "#0072B2",
    "LLL-RGPR-LL": "#009E73",
    "LLL-RGPR-OOD": "#000000",
    "LLL-RGPR-onset": "#D55E00",
}

_STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "rgpr",  # the same picture is the same file
}


def between(seeds: Tensor, dim: int) -> Tensor:
    """The standard deviation between seeds, as in the tables; of one alone zero."""
    return seeds.std(dim, correction=min(1, seeds.shape[dim] - 1))


@contextmanager
def drawing(
    folder: Path, name: str, caption: str, **subplots: Any
) -> Iterator[tuple[Any, Any, Figure]]:
    """A figure to draw into, written as ``NAME.png`` and ``NAME.svg`` when left.

    Args:
        folder: Where to.
        name: Of the files, without ending.
        caption: For the report.
        **subplots: For ``plt.subplots``.

    Yields:
        matplotlib's figure, its axes, and the block for the section.
    """
    # Here, as experiments run where there is nothing to draw with.
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=COLORS)}):
        figure, axes = plt.subplots(**subplots)
        try:
            yield figure, axes, Figure(name, caption)
            for ending in ("png", "svg"):
                with replacing(folder / f"{name}.{ending}") as temporary:
                    about = {"Date": None} if ending == "svg" else {}
                    figure.savefig(temporary, format=ending, metadata=about)
        finally:
            plt.close(figure)


@contextmanager
def panels(
    folder: Path, name: str, caption: str, titles: Sequence[str]
) -> Iterator[tuple[Any, Figure]]:
    """:func:`drawing` with a panel for each title, three to a row, and their legend after them.

    Yields:
        The panels, and the block for the section.
    """
    rows = len(titles) // 3 + 1
    with drawing(folder, name, caption, nrows=rows, ncols=3, figsize=(8, 2.4 * rows)) as drawn:
        _, axes, block = drawn
        shown, spare = axes.flat[: len(titles)], axes.flat[len(titles) :]
        for axis, title in zip(shown, titles, strict=True):
            axis.set_title(title)
        yield shown, block
        for axis in spare:
            axis.axis("off")
        spare[0].legend(*shown[0].get_legend_handles_labels(), loc="center left")
