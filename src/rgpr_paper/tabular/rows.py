"""The sets, their splits in standardised units, and rows that are strange on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rgpr import noise

from ..data import REGRESSION_SETS, read_regression

__all__ = [
    "CLASSES",
    "NUMBERS",
    "Split",
    "read_classes",
    "read_numbers",
    "shifted_rows",
    "split",
    "strange",
]

# Sets with classes as targets, all of scikit-learn, and sets with numbers.
CLASSES = ("wine", "breast cancer", "iris", "digits")
NUMBERS = ("diabetes", *REGRESSION_SETS)

FAR, WIDTH = 10.0, 3.0
# Rows above this quantile of a column are those that the shifted test set consists of.
SHIFT = 0.9


@dataclass(frozen=True)
class Split:
    """Three parts of a table, in units of the training part.

    Attributes:
        train: Inputs and targets that the network is trained on.
        validation: Inputs and targets that calibrate.
        test: Inputs and targets that are measured.
        units: What was subtracted from every column, and what it was divided by.
        target_units: The same of numbers as targets; nothing of classes.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    units: tuple[Tensor, Tensor]
    target_units: tuple[Tensor, Tensor] | None

    def standardised(self, x: Tensor) -> Tensor:
        """Other rows of the same table in the units of the training part."""
        return _in_units(x, self.units)

    def targets(self, y: Tensor) -> Tensor:
        """Targets of other rows in the units of the training part."""
        return y if self.target_units is None else _in_units(y, self.target_units)

    @property
    def sizes(self) -> list[int]:
        """How many rows train, calibrate and test."""
        return [len(part[0]) for part in (self.train, self.validation, self.test)]


def read_classes(name: str) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, D)`` in float32 and classes ``(N,)`` of one of scikit-learn's sets."""
    from sklearn import datasets

    load = getattr(datasets, f"load_{name.replace(' ', '_')}")
    x, y = load(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.long)


def read_numbers(root: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, D)`` and targets ``(N, 1)`` of a regression set, in float32.

    Raises:
        MissingDataError: The set is not scikit-learn's, and its file is not there.
    """
    if name != "diabetes":
        return read_regression(root, name)
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]


def split(x: Tensor, y: Tensor, seed: int) -> Split:
    """A third of the rows to test, a fifth to calibrate, and the rest to train.

    Numbers as targets are standardised like the columns.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, validation, train = order.tensor_split([len(x) // 3, len(x) // 3 + len(x) // 5])
    units = _moments(x[train])
    target_units = _moments(y[train]) if y.is_floating_point() else None
    x = _in_units(x, units)
    y = y if target_units is None else _in_units(y, target_units)
    return Split(
        train=(x[train], y[train]),
        validation=(x[validation], y[validation]),
        test=(x[test], y[test]),
        units=units,
        target_units=target_units,
    )


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; one for a constant column."""
    spread = values.std(0)
    return values.mean(0), torch.where(spread > 0, spread, 1.0)


def _in_units(values: Tensor, units: tuple[Tensor, Tensor]) -> Tensor:
    return (values - units[0]) / units[1]


def strange(test: Tensor, seed: int) -> dict[str, Tensor]:
    """Strange rows by their kind, made of test rows in standardised units."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "shuffled": noise.permuted(test, scale=(1.0, 1.0), generator=generator),
        "scaled": FAR * test,
        "noisy": test + WIDTH * torch.randn(test.shape, generator=generator),
    }


def shifted_rows(x: Tensor, y: Tensor) -> tuple[int, Tensor]:
    """The most informative column, and which rows have the largest values of it.

    The column is that of the largest mutual information with the target. The rows are those above
    its 90 % quantile, so that equal values stay together. Columns with so few values that less
    than a twentieth of the rows lies above are passed over.

    Returns:
        The column's number, and booleans ``(N,)``.
    """
    from sklearn.feature_selection import mutual_info_regression

    above = x > x.quantile(SHIFT, dim=0)
    information = torch.tensor(
        mutual_info_regression(x.numpy(), y[:, 0].numpy(), random_state=0), dtype=torch.float64
    )
    enough = above.double().mean(0) >= (1 - SHIFT) / 2
    column = int(torch.where(enough, information, -torch.inf).argmax())
    return column, above[:, column]
