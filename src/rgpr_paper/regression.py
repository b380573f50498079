"""Networks and posteriors of the regression experiments: small, on the CPU, in seconds."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rgpr.posteriors import Posterior, SWAGCollector, fit_laplace

from .training import RunOptions, TrainingPlan, regression_net, train

__all__ = ["SAMPLES", "SIGMA2", "fitted_laplace", "swag", "trained_regressor"]

# The paper's value for regression: small enough for Proposition 1.
SIGMA2 = 1e-3
SAMPLES = 100


def trained_regressor(x: Tensor, y: Tensor, *, seed: int, epochs: int) -> nn.Module:
    """A ReLU network with 50 hidden units, by Adam on the mean squared error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = regression_net(x.shape[1])
    plan = TrainingPlan(
        lr=1e-2,
        weight_decay=1e-4,
        epochs=epochs,
        batch_size=100,
        milestones=(epochs // 2, 3 * epochs // 4),
        loss="regression",
    )
    train(network, (x, y), plan, RunOptions(seed=seed, progress=False))
    return network


def fitted_laplace(
    network: nn.Module, x: Tensor, y: Tensor, weights: str, *, noise: float | None = None
) -> Any:
    """A Kronecker-factored Laplace approximation; prior precision by the evidence.

    Args:
        network: The trained network; it is not changed.
        x: Inputs ``(N, D)``.
        y: Targets ``(N, 1)``.
        weights: ``"last_layer"`` or ``"all"``.
        noise: Standard deviation of the observations; by the evidence too if left out.

    Returns:
        The fitted laplace-torch object.
    """
    loader = DataLoader(TensorDataset(x, y), batch_size=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about its own defaults
        la = fit_laplace(network, loader, "regression", subset=weights)
    precision, std = _best_evidence(la, noise)
    la.prior_precision, la.sigma_noise = precision, std
    return la


@torch.no_grad()
def _best_evidence(la: Any, noise: float | None) -> tuple[float, float]:
    """Prior precision and noise of the largest marginal likelihood, by grids that close in.

    Not by its gradient: laplace-torch 0.3 drops that of the determinant in the noise.
    """
    centre, reach, best = (0.0, 0.0), 8.0, -torch.inf
    steps = torch.linspace(-1, 1, 9).tolist()
    for _ in range(5):
        start = centre
        for i in steps:
            for j in steps if noise is None else [0.0]:
                logs = torch.tensor([start[0] + reach * i, start[1] + reach * j])
                precision, std = logs.exp()
                fixed = std if noise is None else torch.tensor(noise)
                evidence = float(la.log_marginal_likelihood(precision, fixed))
                if evidence > best:
                    best, centre = evidence, (float(logs[0]), float(logs[1]))
        reach /= 3
    return math.exp(centre[0]), math.exp(centre[1]) if noise is None else noise


def swag(network: nn.Module, x: Tensor, y: Tensor, *, seed: int, epochs: int) -> Posterior:
    """Goes on from the trained network by SGD with a constant rate; an iterate each epoch."""
    network = copy.deepcopy(network)
    collector = SWAGCollector(network)
    plan = TrainingPlan(
        optimizer="sgd",
        lr=0.1,
        weight_decay=1e-4,
        epochs=epochs,
        batch_size=100,
        milestones=(),
        loss="regression",
    )
    train(
        network,
        (x, y),
        plan,
        RunOptions(seed=seed, progress=False, callback=lambda epoch, _: collector.collect()),
    )
    return collector.posterior(n_samples=SAMPLES)
