"""What is kept of the past for a picture: evenly spaced points, never more than a fixed number.

A point is kept for every input whose number is a multiple of a stride. When there are too many, the
stride doubles and every second point goes. So which points there are depends on the stream alone
and not on the batches it came in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["POINTS", "Trace"]

POINTS = 512

Array = NDArray[np.float64]


class Trace:
    """Numbers of inputs, times and values of several columns.

    Args:
        points: Rows of number, time (NaN if unknown) and columns, ``(N, 2 + S)``.
        stride: The distance between points.
    """

    def __init__(self, points: Array, stride: int = 1) -> None:
        self.points, self.stride = points, stride

    @classmethod
    def empty(cls, columns: int) -> Trace:
        return cls(np.empty((0, 2 + columns)))

    def add(self, first: int, rows: Array, at: float | None) -> None:
        """Take in the values ``(T, S)`` of the inputs from number ``first`` on, and their time."""
        numbers = np.arange(first, first + len(rows))
        kept = numbers % self.stride == 0
        time = np.full((int(kept.sum()), 1), np.nan if at is None else at)
        new = np.concatenate([numbers[kept, None], time, rows[kept]], 1)
        self.points = np.concatenate([self.points, new])
        while len(self.points) > POINTS:
            self.stride *= 2
            self.points = self.points[self.points[:, 0] % self.stride == 0]

    def time_of(self, number: int) -> float | None:
        """The time of the first kept input from this number on, if it is known."""
        later = self.points[self.points[:, 0] >= number]
        if not len(later) or np.isnan(later[0, 1]):
            return None
        return float(later[0, 1])
