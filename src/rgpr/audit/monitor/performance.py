r"""How good predictions were over time, from labels that come late and in any order.

Inputs are numbered from 1 in the order they came. A window is a run of numbers, and for each there
are sums: how many inputs have labels by now, how many of these were predicted rightly, and their
loss. Of classes and labels this is the negative log-likelihood, :math:`-\log p_y` (of several
labels the sum over them); of numbers it is the squared error, averaged over outputs. There are
never more than a fixed number of windows: when the stream outgrows them, windows double and
neighbours are added. Which inputs have labels is kept as runs of numbers, so that none counts
twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...likelihoods import LabelLikelihood, Likelihood
from ...likelihoods.labels import of_target

__all__ = ["WINDOWS", "Performance", "Window", "judged"]

WINDOWS = 512

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """How good predictions were for a run of inputs.

    Attributes:
        first: Number of its first input, counted from 1.
        last: Number of its last input.
        labelled: How many of them have labels by now.
        accuracy: The share of these that was predicted rightly (of several labels, the share of
            labels); ``None`` for regression.
        loss: The mean negative log-likelihood, or for regression the mean squared error.
    """

    first: int
    last: int
    labelled: int
    accuracy: float | None
    loss: float


class Performance:
    """Sums for each window.

    Args:
        window: How many inputs a window has.
        sums: Labelled inputs, right ones and loss of each window, ``(W, 3)``.
        runs: First and last number of each run of inputs with labels, in ascending order,
            ``(R, 2)``.
    """

    def __init__(
        self, window: int, sums: Array | None = None, runs: NDArray[np.int64] | None = None
    ) -> None:
        self.window = window
        self.sums = np.zeros((0, 3)) if sums is None else sums
        self.runs = np.zeros((0, 2), np.int64) if runs is None else runs

    def check_new(self, numbers: NDArray[np.int64]) -> None:
        """Refuse inputs that have labels already."""
        run = np.searchsorted(self.runs[:, 0], numbers, side="right") - 1
        known = numbers[run >= 0]
        known = known[known <= self.runs[run[run >= 0], 1]]
        if len(known):
            raise ValueError(
                f"input {known[0]} has a label already, and so have {len(known)} of these "
                f"{len(numbers)} inputs; an input counts once, so give new ones alone. None of "
                "these was taken in"
            )

    def add(self, numbers: NDArray[np.int64], right: Array, loss: Array) -> None:
        """Take in labelled inputs by their numbers, ``(B,)`` each."""
        if not len(numbers):
            return
        last = int(numbers.max())
        while (last - 1) // self.window >= WINDOWS:
            self.window *= 2
            even = np.concatenate([self.sums, np.zeros((len(self.sums) % 2, 3))])
            self.sums = even.reshape(-1, 2, 3).sum(1)
        missing = (last - 1) // self.window + 1 - len(self.sums)
        self.sums = np.concatenate([self.sums, np.zeros((max(0, missing), 3))])
        rows = np.stack([np.ones(len(numbers)), right, loss], 1)
        np.add.at(self.sums, (numbers - 1) // self.window, rows)
        runs = np.concatenate([self.runs, np.stack([numbers, numbers], 1)])
        runs = runs[runs[:, 0].argsort()]
        apart = runs[1:, 0] > runs[:-1, 1] + 1
        firsts, lasts = np.append(True, apart), np.append(apart, True)
        self.runs = np.stack([runs[firsts, 0], runs[lasts, 1]], 1)

    def windows(self, accuracies: bool) -> list[Window]:
        """Windows with labels, in their order; with accuracies or without."""
        return [
            Window(
                number * self.window + 1,
                (number + 1) * self.window,
                int(count),
                float(right / count) if accuracies else None,
                float(loss / count),
            )
            for number, (count, right, loss) in enumerate(self.sums)
            if count
        ]


def judged(predicted: Tensor, y: Tensor, likelihood: Likelihood) -> tuple[Array, Array]:
    """What is right about predictions and their loss, ``(B,)`` each.

    Args:
        predicted: Probabilities ``(B, C)`` as a plain call of the model gives them, or for
            regression the means.
        y: The labels or targets.
        likelihood: What the outputs stand for.

    Raises:
        ValueError: The labels do not fit the predictions.
    """
    predicted = predicted.detach().double()
    target = likelihood.target(y.to(predicted.device), tuple(predicted.shape), 0)
    if not isinstance(likelihood, LabelLikelihood):
        error = (predicted - target).square().mean(1)
        return np.zeros(len(error)), error.cpu().numpy()
    right = (likelihood.prediction(predicted) == target).double().reshape(len(target), -1).mean(1)
    table = predicted if target.dim() == 1 else torch.stack([1 - predicted, predicted], -1)
    each = -of_target(table, target.long()).clamp_min(torch.finfo(torch.float64).tiny).log()
    return right.cpu().numpy(), each.reshape(len(target), -1).sum(1).cpu().numpy()
