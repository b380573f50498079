"""Where pictures are drawn: on the Axes that a caller passes, or on new ones of matplotlib.

New figures belong to pyplot, so that a notebook shows them and ``plt.show()`` does elsewhere. Those
that are written to a file are closed, so that a process that draws every day does not keep them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ._atomic import replacing

__all__ = ["check_form", "one", "row", "write"]


def row(count: int, width: float = 4.0, height: float = 3.4) -> Any:
    """An array of ``count`` new Axes side by side, each ``width`` by ``height`` inches."""
    import matplotlib.pyplot as plt

    size = (width * count, height)
    return plt.subplots(ncols=count, figsize=size, squeeze=False, layout="constrained")[1][0]


def one(ax: Any, width: float = 6.4, height: float = 4.0) -> Any:
    """The Axes ``ax``, or new ones if it is ``None``."""
    return row(1, width, height)[0] if ax is None else ax


def write(ax: Any, path: str | os.PathLike[str] | None, *, made: bool) -> None:
    """Write the figure of some Axes to a file, all of it or nothing; to none if it is ``None``.

    Args:
        ax: The Axes.
        path: The file.
        made: Whether :func:`one` or :func:`row` made them for this picture. Once such a figure is
            in a file it is closed, since pyplot would keep it forever. Axes that a user passed
            belong to the user, and their figure stays as it is.
    """
    if path is None:
        return
    with replacing(path) as temporary:
        ax.figure.savefig(temporary, dpi=120)
    if made:
        import matplotlib.pyplot as plt

        plt.close(ax.figure)


def check_form(path: Path) -> None:
    """Refuse a file that no picture can be written to, before the work.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
        ValueError: The name ends in no form of picture that matplotlib writes.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(
            f"{path} ends in '{path.suffix}', and matplotlib writes no such picture; name a file "
            "that ends in .png or .svg"
        )
