r"""Any number of labels for each input: each output is a label's own logit.

With outputs :math:`N(m, V)` and the residual's variance ``v``, the probability of a label is

.. math:: p_i = \sigma\Big(\frac{m_i}{T \sqrt{1 + \frac\pi8 (V_{ii} + v)}}\Big)

by the probit, and goes to 1/2 far away. The negative log-likelihood of an example is the sum of
the labels' binary cross-entropies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import check_known, in_rows, misshapen
from .classification import two_columns
from .labels import LabelLikelihood

__all__ = ["Multilabel"]


class Multilabel(LabelLikelihood):
    """Targets are zeros and ones ``(B, C)``; probabilities ``(B, C)`` are those of the ones."""

    name = "multilabel"

    def choices(self, logits: Tensor) -> Tensor:
        return two_columns(logits[..., None])

    def confidence(self, probabilities: Tensor) -> Tensor:
        return torch.maximum(probabilities, 1 - probabilities).amax(1)

    def prediction(self, probabilities: Tensor) -> Tensor:
        return (probabilities > 0.5).long()

    def target(self, target: Tensor, outputs: tuple[int, ...], number: int) -> Tensor:
        """Zeros and ones ``(B, C)`` in int64, from any dtype."""
        labels = outputs[1]
        wanted = f"(B, {labels}), a zero or a one for each label"
        flat = in_rows(target, outputs, number, wanted)
        if flat.shape[1] == 1 < labels:
            raise misshapen(
                target,
                outputs,
                number,
                f"{wanted}. If these are class indices, one for each input, use "
                "likelihood='classification'",
            )
        if flat.shape[1] != labels:
            raise misshapen(target, outputs, number, wanted)
        check_known(flat, number)
        wrong = (flat != 0) & (flat != 1)
        if bool(wrong.any()):
            value = flat[wrong][0].item()
            remedy = "give (y > 0.5) for shares"
            if bool((flat.abs() == 1).all()):
                remedy = "give (y > 0) if -1 stands for a label that is not there"
            elif value in (-1, -100):
                remedy = f"if {value:g} marks labels that are not known, remove these rows"
            raise ValueError(
                f"batch {number} has the target {value:g}; a label is there (1) or not (0). "
                f"Otherwise {remedy}"
            )
        return flat.long()

    def _check_last(self, last: str) -> None:
        if last == "LogSoftmax":
            raise ValueError(
                "the network ends in a log-softmax, so its outputs are of classes of which one "
                "is right: use likelihood='classification', or leave it out"
            )
