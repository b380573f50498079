"""Prediction of a LeNet, batch 256, by every base posterior: without and with the residual."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rgpr import RGPR
from rgpr.baselines.gp_residual import GPDSCS
from rgpr.posteriors import (
    KFL,
    MAP,
    SVDKL,
    DiagonalLaplace,
    Ensemble,
    MCDropout,
    Posterior,
    SWAGCollector,
    Temperature,
    as_posterior,
)
from rgpr.posteriors.links import probit
from rgpr_paper.training import lenet

from .timing import race


def _data() -> DataLoader[Any]:
    x = torch.rand(128, 1, 28, 28)
    return DataLoader(TensorDataset(x, torch.arange(128) % 10), batch_size=64)


def _swag(network: nn.Module) -> Posterior:
    collector = SWAGCollector(network)
    for _ in range(3):
        collector.collect()
    return collector.posterior(_data(), n_samples=5, progress=False)


def _last_layer(network: nn.Module) -> Posterior:
    from laplace import Laplace

    la = Laplace(network, "classification", "last_layer", "kron")
    with torch.enable_grad():
        la.fit(_data())
    return as_posterior(la)


def _enabled(build: Callable[[], Posterior]) -> Posterior:
    with torch.enable_grad():
        return build()


BASES: dict[str, Callable[[nn.Module], Posterior]] = {
    "MAP": MAP,
    "temperature": lambda network: Temperature(network, 1.5),
    "last-layer Laplace": _last_layer,
    "KFL, 5 samples": lambda n: _enabled(
        lambda: KFL.fit(n, _data(), prior_precision=100.0, n_samples=5)
    ),
    "diagonal Laplace, 5 samples": lambda n: _enabled(
        lambda: DiagonalLaplace.fit(n, _data(), prior_precision=100.0, n_samples=5)
    ),
    "SWAG, 5 samples": _swag,
    "ensemble of 5": lambda network: Ensemble(
        [network, *(copy.deepcopy(network) for _ in range(4))]
    ),
    "MC dropout, 5 samples": lambda network: MCDropout(
        nn.Sequential(*list(network)[:-1], nn.Dropout(0.2), network[-1]), n_samples=5
    ),
    "SVDKL": lambda n: _enabled(
        lambda: SVDKL.fit(SVDKL.split(n), _data(), epochs=1, progress=False)
    ),
    "GP-DSCS": lambda n: _enabled(lambda: GPDSCS.fit(n, _data(), epochs=1, progress=False)),
}


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    network = lenet().eval()
    x = torch.rand(256, 1, 28, 28)
    zero = torch.zeros(256, dtype=torch.float64)
    for name, build in BASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = build(network).eval()
            model = RGPR(posterior).fit([x])
        runs = {"plain": lambda p=posterior: probit(p(x), zero), "RGPR": lambda m=model: m(x)}
        yield name, race(runs, rounds=11)
