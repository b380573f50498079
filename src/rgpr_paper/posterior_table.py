"""The table of base posteriors: how each is made for scikit-learn's digits.

The experiment ``bases`` measures them, and the conformance tests build the same ones: an entry of
``CLASSIFIERS`` or ``REGRESSORS`` below gives a new posterior both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from rgpr._demo import Task, train
from rgpr.baselines.gp_residual import GPDSCS, RIO, BlightOtt
from rgpr.posteriors import (
    KFL,
    MAP,
    SVDKL,
    SVGP,
    DiagonalLaplace,
    Ensemble,
    FunctionPosterior,
    MCDropout,
    Posterior,
    SWAGCollector,
    Temperature,
    as_posterior,
    choose_prior_precision,
    fit_laplace,
)

__all__ = ["CLASSIFIERS", "REGRESSORS", "loader", "regression_data", "test_data"]

_VALIDATION = 150


def loader(task: Task) -> DataLoader[Any]:
    """The training data."""
    return DataLoader(task.train, batch_size=128)


def test_data(task: Task) -> tuple[Tensor, Tensor]:
    """The part of the test set that no base was validated on."""
    x, y = task.test
    return x[_VALIDATION:], y[_VALIDATION:]


def _validation(task: Task) -> DataLoader[Any]:
    """The other part of the test set."""
    x, y = task.test
    held_out = TensorDataset(x[:_VALIDATION], y[:_VALIDATION])
    return DataLoader(held_out, batch_size=_VALIDATION)


def _last_layer(network: nn.Module, task: Task, structure: str = "kron") -> Posterior:
    la = fit_laplace(network, loader(task), structure=structure, subset="last_layer")
    return choose_prior_precision(la, _validation(task), grid_size=100, progress=False)


def _swag(network: nn.Module, task: Task) -> Posterior:
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    collector = SWAGCollector(network)
    for _ in range(20):
        for x, y in loader(task):
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        collector.collect()
    return collector.posterior()


def _ensemble(network: nn.Module, task: Task) -> Posterior:
    members = [network]
    for seed in (1, 2, 3, 4):
        torch.manual_seed(seed)
        members.append(train(task, epochs=30))
    return Ensemble(members)


def _dropout(network: nn.Module, task: Task) -> Posterior:
    """The network with dropout put in before its last layer, as if trained with it."""
    first, last = list(network.children())[:-1], list(network.children())[-1]
    return MCDropout(nn.Sequential(*first, nn.Dropout(0.2), last))


def _function(network: nn.Module, task: Task) -> Posterior:
    """Noise on the logits, as a stand-in for a sampler of the user's own."""

    def draw(x: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        point: Tensor = network(x)
        shape = (n_samples, 1, point.shape[1])
        return point + 0.1 * torch.randn(shape, generator=generator, dtype=point.dtype)

    return FunctionPosterior(network, draw)


CLASSIFIERS: dict[str, Callable[[nn.Module, Task], Posterior]] = {
    "MAP": lambda network, task: MAP(network),
    "temperature": lambda network, task: Temperature(network).fit(
        _validation(task), progress=False
    ),
    "last-layer Laplace, kron": _last_layer,
    "last-layer Laplace, diag": lambda network, task: _last_layer(network, task, "diag"),
    "last-layer Laplace, full": lambda network, task: _last_layer(network, task, "full"),
    "temperature below LLL": lambda network, task: Temperature(_last_layer(network, task)).fit(
        _validation(task), progress=False
    ),
    "KFL": lambda network, task: KFL.fit(network, loader(task), val_loader=_validation(task)),
    "KFL, linearised": lambda network, task: as_posterior(
        fit_laplace(network, loader(task), prior_precision=100.0)
    ),
    "diagonal Laplace": lambda network, task: DiagonalLaplace.fit(
        network, loader(task), val_loader=_validation(task)
    ),
    "SWAG": _swag,
    "ensemble": _ensemble,
    "MC dropout": _dropout,
    "function of samples": _function,
    "SVDKL": lambda network, task: SVDKL.fit(
        SVDKL.split(network), loader(task), classes=task.classes, progress=False
    ),
    "GP-DSCS": lambda network, task: GPDSCS.fit(network, loader(task), progress=False),
    "RIO": lambda network, task: RIO.fit(network, loader(task), progress=False),
}


def regression_data(task: Task, n: int = 300) -> tuple[Tensor, Tensor]:
    """How much ink is in the upper half, through a sine: something smooth to regress on."""
    x = task.train.tensors[0][:n]
    return x, x[:, :32].sum(1, keepdim=True).div(4).sin()


REGRESSORS: dict[str, Callable[[Task], Posterior]] = {
    "SVGP": lambda task: SVGP.fit(*regression_data(task), progress=False),
    "Blight-Ott": lambda task: BlightOtt.fit([regression_data(task)], progress=False),
}
