r"""Variational rectified activation, by Xu et al. (2023): low features to zero, high ones capped.

.. math:: g(h) = 0 \text{ if } h < \alpha, \quad \min(h, \beta) \text{ otherwise,}

and the score is the energy of the logits of :math:`g(h)`. As in the authors' code,
:math:`\alpha` and :math:`\beta` are quantiles of each feature over the training images.
pytorch-ood raises low features to :math:`\alpha` instead, and so does OpenOOD, with one
:math:`\alpha` and one :math:`\beta` for all features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Bench, Fitted, Rival, register_rival

# The percentiles of alpha and beta in the authors' commands for CIFAR-10 and CIFAR-100.
_PUBLISHED = {"cifar10": (60, 90), "cifar100": (60, 95)}


def _fit(bench: Bench) -> Fitted:
    low, high = _PUBLISHED.get(bench.competing.name, _PUBLISHED["cifar10"])
    alpha, beta = (bench.train.features.quantile(q / 100, 0) for q in (low, high))

    def score(features: Tensor) -> Tensor:
        changed = torch.where(features < alpha, 0.0, features.minimum(beta))
        logits: Tensor = bench.head(changed)
        return -logits.double().logsumexp(1)

    return Fitted(score, f"percentiles {low} and {high}")


register_rival(
    Rival(
        "VRA",
        "Xu et al. 2023",
        "this experiment",
        "features",
        trains=True,
        fit=_fit,
        source="the authors' for CIFAR-10 and CIFAR-100, chosen on Gaussian noise, those for "
        "CIFAR-10 on other sets; the authors take ODIN's confidence on CIFAR-100, not the energy",
    )
)
