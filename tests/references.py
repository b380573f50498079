"""Slow, obvious, float64 versions of what the library does, read off the paper."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn


def cubic_spline_polynomial(x: float, y: float, c: float = 0.0) -> float:
    """The paper's expanded formula of the cubic spline kernel, in exact arithmetic."""
    fx, fy, fc = Fraction(x), Fraction(y), Fraction(c)
    low = min(fx, fy)
    if low <= fc:
        return 0.0
    return float((low**3 - fc**3) / 3 - (low**2 - fc**2) / 2 * (fx + fy) + (low - fc) * fx * fy)


def dscs_sum(x: Tensor, y: Tensor, c: float = 0.0) -> float:
    """Features pointing right plus features pointing left, averaged over dimensions."""
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    right = [cubic_spline_polynomial(a, b, c) for a, b in pairs]
    left = [cubic_spline_polynomial(-a, -b, c) for a, b in pairs]
    return math.fsum(right + left) / len(pairs)


def standardised(h: Tensor, training: Tensor) -> Tensor:
    """By the training data's moments; a unit that never varied by its layer's median spread."""
    h, training = h.flatten(1).double(), training.flatten(1).double()
    std = training.std(0, correction=0)
    return (h - training.mean(0)) / torch.where(std > 0, std, std[std > 0].median())


def unit_variance(h: Tensor, training: Tensor) -> Tensor:
    """u of one representation: standardise by the training data, then the mean of |z|^3 / 3."""
    return standardised(h, training).abs().pow(3).mean(1) / 3


def nearest_distance(
    points: Tensor, training: Tensor, classes: Tensor, shrinkage: float = 0.1
) -> Tensor:
    """Of rows ``(B, D)`` to the nearest class mean, in the spread within classes: Mahalanobis.

    The root of the mean over the ``D`` directions, each in units of its own spread.
    """
    points, training = points.double(), training.double()
    means = torch.stack([training[classes == c].mean(0) for c in classes.unique()])
    own = torch.stack([training[classes == c].mean(0) for c in classes])
    covariance = (training - own).T @ (training - own) / len(training)
    eye = torch.eye(len(covariance), dtype=torch.float64, device=covariance.device)
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().mean() * eye
    deviations = points[:, None] - means
    squared = torch.einsum("bki,ij,bkj->bk", deviations, shrunk.inverse(), deviations)
    return (squared.amin(1) / points.shape[1]).sqrt()


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """Gradients of every output in every parameter, one backward pass each: (B, C, P)."""
    rows = []
    for example in x:
        outputs = network(example[None])[0]
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [
                            g.reshape(-1)
                            for g in torch.autograd.grad(
                                output, list(network.parameters()), retain_graph=True
                            )
                        ]
                    )
                    for output in outputs
                ]
            )
        )
    return torch.stack(rows).detach()


def search_prior_precision(la: Any, val_loader: Any, grid_size: int) -> None:
    """laplace-torch's own search for the precision under which the probit predicts best."""
    la.optimize_prior_precision(
        pred_type="glm",
        method="gridsearch",
        link_approx="probit",
        val_loader=val_loader,
        # Its own loss is never reset: each precision would get the mean of all before it.
        loss=lambda p, y: nn.functional.nll_loss(p.log(), y),
        grid_size=grid_size,
    )
