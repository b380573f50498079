"""What a likelihood is, and the table of those that are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["LIKELIHOODS", "Likelihood", "check_known", "in_rows"]

# All likelihoods by name; subclasses of Likelihood enter themselves.
LIKELIHOODS: dict[str, Likelihood] = {}


class Likelihood(ABC):
    """What outputs stand for. An object of it holds no state.

    Attributes:
        name: What ``RGPR(..., likelihood=...)`` calls it.
        answers: Names of what a plain call returns.
        independent: Whether each output is answered by itself, whatever the others are.
        sets: Whether one of several classes is right, so that ``predict_set`` answers and
            ``interval`` does not.
    """

    name: ClassVar[str]
    answers: ClassVar[tuple[str, ...]]
    independent: ClassVar[bool] = True
    sets: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            LIKELIHOODS[cls.name] = cls()

    @abstractmethod
    def target(self, target: Tensor, outputs: tuple[int, ...], number: int) -> Tensor:
        """The targets in the one form that all other code takes, from any harmless form.

        Args:
            target: What a loader gave for a batch.
            outputs: The shape of the outputs for this batch, ``(B, C)``.
            number: The number of the batch, for errors.

        Raises:
            ValueError: They do not fit the outputs; the message names the batch.
        """
        raise NotImplementedError

    def check_outputs(self, outputs: Tensor, again: Callable[[], Tensor]) -> None:
        """Refuse outputs that are not what this likelihood takes them for; here all are taken.

        Args:
            outputs: The network's outputs for a batch, ``(B, C)``.
            again: Gives the outputs of a few rows once more, from a pass of its own.

        Raises:
            ValueError: The message says which part of the network to leave out.
        """
        return

    def classes(self, outputs: int) -> int:
        """The number of classes behind so many outputs, for one prototype a class.

        Where a row has no single class, all rows are of one. Where there are more, targets are
        the classes ``(B,)``.
        """
        return 1

    def predicted(self, outputs: Tensor) -> Tensor:
        """The class of each row, ``(B,)``, that the outputs ``(B, C)`` predict."""
        return torch.zeros(len(outputs), dtype=torch.long, device=outputs.device)

    def evidence(self, outputs: Tensor) -> Tensor | None:
        """How much the outputs ``(B, C)`` say, ``(B,)``, for the score; ``None`` for nothing."""
        return None


def in_rows(target: Tensor, outputs: tuple[int, ...], number: int, expected: str) -> Tensor:
    """Targets with one row for each input, ``(B, K)``.

    Args:
        target: What a loader gave for a batch.
        outputs: The shape of the outputs for this batch, ``(B, C)``.
        number: The number of the batch.
        expected: What was expected instead, as the end of an error.

    Raises:
        ValueError: There is not one row for each input.
    """
    if target.dim() == 0 or len(target) != outputs[0]:
        raise misshapen(target, outputs, number, expected)
    return target.reshape(len(target), -1)


def check_known(target: Tensor, number: int) -> Tensor:
    """The labels, none of which may be NaN: that stands for one that is not known.

    Raises:
        ValueError: The message names the batch and the row.
    """
    missing = target.isnan().reshape(len(target), -1).any(1)
    if bool(missing.any()):
        raise ValueError(
            f"batch {number} has no label in {int(missing.sum())} of its {len(target)} rows (NaN, "
            f"first in row {int(missing.nonzero()[0])}); remove rows without a label"
        )
    return target


def misshapen(target: Tensor, outputs: tuple[int, ...], number: int, expected: str) -> ValueError:
    """The error for targets of a shape that does not fit; arguments as for :func:`in_rows`."""
    return ValueError(
        f"batch {number} has targets of shape {tuple(target.shape)} for {outputs[0]} inputs "
        f"and outputs of shape {tuple(outputs)}; expected {expected}"
    )
