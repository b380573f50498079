r"""Generalised entropy, by Liu et al. (2023), from the ``M`` largest probabilities.

.. math:: G(x) = \sum_{c \le M} p_c^\gamma (1 - p_c)^\gamma, \quad p_1 \ge p_2 \ge \dots

pytorch-ood clamps probabilities to :math:`[10^{-7}, 1 - 10^{-7}]` before, so that all very
confident inputs get one score. The paper and OpenOOD do not, and neither does this file.
"""

from __future__ import annotations

from torch import Tensor

from .base import Bench, Fitted, Rival, register_rival

__all__ = ["generalised_entropy"]


def generalised_entropy(logits: Tensor, gamma: float, largest: int) -> Tensor:
    """The score of each row of logits, ``(B,)`` in float64, higher for stranger inputs."""
    p = logits.double().log_softmax(1).sort(1, descending=True).values
    rest = -p.expm1()
    # One minus a top probability near one would round to zero; the sum of the others does not.
    rest[:, 0] = p[:, 1:].exp().sum(1)
    return ((gamma * p).exp() * rest.pow(gamma))[:, :largest].sum(1)


def _fit(bench: Bench) -> Fitted:
    largest = min(100, bench.classes)
    setting = f"gamma 0.1, the {largest} largest probabilities"
    return Fitted(lambda logits: generalised_entropy(logits, 0.1, largest), setting)


register_rival(
    Rival(
        "GEN",
        "Liu et al. 2023",
        "this experiment",
        "logits",
        trains=False,
        fit=_fit,
        source="the paper's for ImageNet, with which OpenOOD starts; or all classes if fewer",
    )
)
