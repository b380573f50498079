r"""Likelihoods whose outputs are logits and whose targets are labels.

Each input is asked one question (of which class is it?) or several (has it this label?), and each
question has alternatives of which one is right. With the alternatives' logits on the last axis,
``(B, C)`` for one question and ``(B, C, 2)`` for several, both are the same: log-probabilities are
a log-softmax over the last axis, and the log-likelihood of an example is the sum over questions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..metrics import accuracy, ece, nll
from .base import Likelihood

__all__ = ["LabelLikelihood", "check_logits", "of_target"]

# What torch calls operations that only give the same numbers another shape or dtype.
_SHAPES = {
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Slice",
}
_SHAPES |= {"Clone", "ToCopy"}
_SQUASHED = {
    "Sigmoid": "a sigmoid",
    "Hardsigmoid": "a hard sigmoid",
    "LogSigmoid": "the logarithm of a sigmoid",
}


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
        with torch.enable_grad():
            last = _last_operation(again())
        if last in _SQUASHED:
            several = "" if outputs.shape[1] == 1 else " and say likelihood='multilabel'"
            raise ValueError(
                f"the network ends in {_SQUASHED[last]}; the residual works on logits. Leave it "
                f"out (train with BCEWithLogitsLoss, or drop the last module){several}"
            )
        self._check_last(last)

    def _check_last(self, last: str) -> None:
        """Refuse other last operations."""


def check_logits(outputs: Tensor) -> None:
    """Refuse outputs of a softmax, ``(B, C)``: squashing twice would pass unnoticed."""
    if outputs.shape[1] > 1:
        distributions = (outputs >= 0).all() & ((outputs.sum(1) - 1).abs() < 1e-4).all()
        if bool(distributions):
            raise ValueError(
                "the network returns probabilities (each row sums to 1); the residual works on "
                "logits. Leave out the final softmax"
            )


def of_target(table: Tensor, target: Tensor) -> Tensor:
    """The entry of each question that belongs to its right alternative.

    Args:
        table: ``(N, C)`` or ``(N, C, 2)``.
        target: ``(N,)`` or ``(N, C)``.
    """
    return table.gather(-1, target[..., None])[..., 0]


def _last_operation(outputs: Tensor) -> str:
    """What torch calls the last operation that made the outputs; empty if it does not know.

    Autograd writes down every operation, so a function is seen as well as a module.
    """
    made = outputs.grad_fn
    while made is not None:
        name = made.name().removeprefix("torch::autograd::").split("Backward")[0]
        if name not in _SHAPES:
            return name
        made = made.next_functions[0][0]
    return ""
