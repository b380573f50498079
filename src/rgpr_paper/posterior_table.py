"""The table of base posteriors: each on scikit-learn's digits, without and with the residual.

``rgpr bases`` prints the table of the documentation. The conformance tests build the same bases, so
an entry of ``CLASSIFIERS`` or ``REGRESSORS`` below gives a new posterior both.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from rgpr._demo import Task, digits, train
from rgpr._progress import bar
from rgpr.baselines.gp_residual import GPDSCS, RIO, BlightOtt
from rgpr.metrics import accuracy, confidence, ece
from rgpr.model import RGPR
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

__all__ = ["CLASSIFIERS", "REGRESSORS", "table"]

ALPHAS = (1.0, 2000.0, 1e6)
SIGMA2 = 0.1
_VALIDATION = 150


def _loader(task: Task) -> DataLoader[Any]:
    return DataLoader(task.train, batch_size=128)


def _validation(task: Task) -> DataLoader[Any]:
    """A part of the test set, which the table then leaves out."""
    x, y = task.test
    held_out = TensorDataset(x[:_VALIDATION], y[:_VALIDATION])
    return DataLoader(held_out, batch_size=_VALIDATION)


def _last_layer(network: nn.Module, task: Task, structure: str = "kron") -> Posterior:
    la = fit_laplace(network, _loader(task), structure=structure, subset="last_layer")
    return choose_prior_precision(la, _validation(task), grid_size=100, progress=False)


def _swag(network: nn.Module, task: Task) -> Posterior:
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    collector = SWAGCollector(network)
    for _ in range(20):
        for x, y in _loader(task):
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
    "KFL": lambda network, task: KFL.fit(network, _loader(task), val_loader=_validation(task)),
    "KFL, linearised": lambda network, task: as_posterior(
        fit_laplace(network, _loader(task), prior_precision=100.0)
    ),
    "diagonal Laplace": lambda network, task: DiagonalLaplace.fit(
        network, _loader(task), val_loader=_validation(task)
    ),
    "SWAG": _swag,
    "ensemble": _ensemble,
    "MC dropout": _dropout,
    "function of samples": _function,
    "SVDKL": lambda network, task: SVDKL.fit(
        SVDKL.split(network), _loader(task), classes=task.classes, progress=False
    ),
    "GP-DSCS": lambda network, task: GPDSCS.fit(network, _loader(task), progress=False),
    "RIO": lambda network, task: RIO.fit(network, _loader(task), progress=False),
}


def regression_data(task: Task, n: int = 300) -> tuple[Tensor, Tensor]:
    """How much ink is in the upper half, through a sine: something smooth to regress on."""
    x = task.train.tensors[0][:n]
    return x, x[:, :32].sum(1, keepdim=True).div(4).sin()


REGRESSORS: dict[str, Callable[[Task], Posterior]] = {
    "SVGP": lambda task: SVGP.fit(*regression_data(task), progress=False),
    "Blight-Ott": lambda task: BlightOtt.fit([regression_data(task)], progress=False),
}


def table(*, quick: bool = False, progress: bool = True) -> str:
    """The comparison as Markdown, every number measured now.

    Args:
        quick: A tenth of the training, and sixty test images.
        progress: Show how far it is.
    """
    task = digits(0)
    torch.manual_seed(0)
    network = train(task, epochs=10 if quick else 100)
    x, y = (t[_VALIDATION : _VALIDATION + 60 if quick else None] for t in task.test)
    head = "| base | residual | accuracy | ECE | alpha = 1 | alpha = 2000 | alpha = 1e6 |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, build in bar(CLASSIFIERS.items(), "bases", progress):
        for label, model in _with_and_without(build(network, task), _loader(task)):
            with torch.no_grad():
                p, *far = (model(a * x) for a in ALPHAS)
            shown = " | ".join(f"{confidence(q).mean().item():.3f}" for q in (p, *far))
            lines.append(f"| {name} | {label} | {accuracy(p, y):.1%} | {ece(p, y):.1%} | {shown} |")
    lines += ["", "| base | residual | error bar, alpha = 1 | alpha = 2000 | alpha = 1e6 |"]
    lines.append("|---|---|---|---|---|")
    for name, build_regressor in REGRESSORS.items():
        loader = [regression_data(task)[0]]
        for label, model in _with_and_without(build_regressor(task), loader):
            with torch.no_grad():
                bars = [model(a * x, diagonal_output=True)[1].sqrt().mean().item() for a in ALPHAS]
            lines.append(f"| {name} | {label} | " + " | ".join(f"{v:.3g}" for v in bars) + " |")
    return "\n".join(lines)


def _with_and_without(base: Posterior, loader: Any) -> list[tuple[str, RGPR]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, extended = (RGPR(base, residual="paper").fit(loader) for _ in range(2))
    plain.sigma2, extended.sigma2 = 0.0, SIGMA2
    return [("-", plain), (f"sigma2 = {SIGMA2}", extended)]
