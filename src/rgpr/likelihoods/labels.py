r"""Likelihoods whose outputs are logits and whose targets are labels.

Each input is asked one question (of which class is it?) or several (has it this label?), and each
question has alternatives of which one is right. With the alternatives' logits on the last axis,
``(B, C)`` for one question and ``(B, C, 2)`` for several, both are the same: log-probabilities are
a log-softmax over the last axis, and the log-likelihood of an example is the sum over questions.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..metrics import accuracy, ece, nll
from .base import Likelihood
from .last_operation import last_operations

__all__ = ["LabelLikelihood", "check_logits", "of_target"]

_SQUASHED = {
    "Sigmoid": "a sigmoid",
    "Hardsigmoid": "a hard sigmoid",
    "LogSigmoid": "the logarithm of a sigmoid",
    "Softmax": "a softmax",
}
# Last operations of which probabilities are made by hand.
_DOUBTFUL = {*_SQUASHED, "exp", "reciprocal"}
# What makes logits of probabilities, as a user writes it.
_LOGIT = "lambda p: p.logit(1e-6)"


class LabelLikelihood(Likelihood):
    """Outputs are logits, targets are labels, and a plain call returns probabilities."""

    answers: ClassVar[tuple[str, ...]] = ("probabilities",)

    @abstractmethod
    def choices(self, logits: Tensor) -> Tensor:
        """Logits of the alternatives on the last axis, from logits ``(..., C)`` of outputs."""

    @abstractmethod
    def confidence(self, probabilities: Tensor) -> Tensor:
        """The largest probability of any alternative, ``(B,)``, from what a plain call returns."""

    @abstractmethod
    def prediction(self, probabilities: Tensor) -> Tensor:
        """The most probable target, from what a plain call returns."""

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the alternatives on the last axis, from logits of outputs."""
        return torch.log_softmax(self.choices(logits), -1)

    def evidence(self, outputs: Tensor) -> Tensor:
        """The mean over questions of that in each, see :mod:`rgpr.answers.score`; ``(B,)``."""
        logits = self.choices(outputs)
        # From the largest, so that a common part of all logits costs no digits.
        logits = logits - logits.amax(-1, keepdim=True)
        each = torch.logsumexp(logits, -1) - logits.mean(-1)
        return each if each.dim() == 1 else each.mean(1)

    def nll(self, probabilities: Tensor, target: Tensor) -> float:
        """The mean over examples of the sum over questions; arguments as for :meth:`alone`."""
        questions = target[:1].numel()
        return questions * nll(*self.alone(probabilities, target))

    def ece(self, probabilities: Tensor, target: Tensor) -> float:
        """The calibration error over all questions; arguments as for :meth:`alone`."""
        return ece(*self.alone(probabilities, target))

    def accuracy(self, probabilities: Tensor, target: Tensor) -> float:
        """The share of questions that are answered correctly; arguments as for :meth:`alone`."""
        return accuracy(*self.alone(probabilities, target))

    def alone(self, probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Every question as an example of its own, as :mod:`rgpr.metrics` takes them.

        Args:
            probabilities: Of the alternatives, ``(N, C)`` or ``(N, C, 2)``.
            target: What :meth:`target` gave for these examples.
        """
        return probabilities.reshape(-1, probabilities.shape[-1]), target.reshape(-1)

    def check_outputs(self, outputs: Tensor, again: Callable[[], Tensor]) -> None:
        check_logits(outputs)
        inside = (outputs >= 0) & (outputs <= 1)
        if not bool(inside.all() | (outputs <= 0).all()):
            return
        # A trained network's logits may lie in [0, 1] by chance, so values alone prove nothing.
        last = last_operations(again)
        squashed = sorted(_SQUASHED.keys() & last)
        if squashed and len(squashed) == len(last):
            raise ValueError(_ends_in(squashed[0], outputs.shape[1]))
        if last == {"LogSoftmax"}:
            if outputs.shape[1] == 1:
                raise ValueError(
                    "the network returns one column of a log-softmax, the logarithm of a "
                    "probability; the residual works on logits. Return all columns, or the logits"
                )
            self._check_last("LogSoftmax")
        if bool(inside.all()) and (not last or last & _DOUBTFUL):
            warnings.warn(
                "all outputs of the first batch lie between 0 and 1, as probabilities do, and how "
                "the network makes them could not be seen; the residual works on logits. If they "
                "are probabilities, leave out what makes them so, or pass RGPR(network, "
                f"output={_LOGIT}). If they are numbers to predict, say likelihood='regression'. "
                "If they are logits, nothing is wrong; warnings.filterwarnings('ignore', "
                "'all outputs of the first batch') silences this",
                stacklevel=2,
            )

    def _check_last(self, last: str) -> None:
        """Refuse other last operations."""


def check_logits(outputs: Tensor) -> None:
    """Refuse outputs of a softmax, ``(B, C)``: squashing twice would pass unnoticed."""
    if outputs.shape[1] > 1:
        distributions = (outputs >= 0).all() & ((outputs.sum(1) - 1).abs() < 1e-4).all()
        if bool(distributions):
            raise ValueError(
                "the network returns probabilities (each row sums to 1); the residual works on "
                "logits. Leave out the final softmax, as network[:-1] does for an nn.Sequential, "
                "or pass RGPR(network, output=lambda p: p.log())"
            )


def of_target(table: Tensor, target: Tensor) -> Tensor:
    """The entry of each question that belongs to its right alternative.

    Args:
        table: ``(N, C)`` or ``(N, C, 2)``.
        target: ``(N,)`` or ``(N, C)``.
    """
    return table.gather(-1, target[..., None])[..., 0]


def _ends_in(last: str, columns: int) -> str:
    """The error for a network with so many outputs whose last operation squashes them."""
    loss, more = "BCEWithLogitsLoss", "" if columns == 1 else " and say likelihood='multilabel'"
    if last == "Softmax":
        loss, more = "CrossEntropyLoss", " and return the logits of all classes"
    return (
        f"the network ends in {_SQUASHED[last]}; the residual works on logits. Leave it out "
        f"(train with {loss}, or drop the last module){more}"
    )
