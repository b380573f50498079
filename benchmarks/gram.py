"""The kernel matrix against the plain n x m x N broadcast, and the exact posterior's growth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rgpr.kernels import dscs, dscs_gram
from rgpr.residual.exact import ResidualProcess

from .timing import race


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    X = torch.randn(1000, 100, device=device)
    runs = {"blocks": lambda: dscs_gram(X), "broadcast": lambda: dscs(X[:, None], X)}
    case = "gram matrix, 1000 x 1000 points, 100 dimensions"
    yield case, race(runs, rounds=5, device=device)
    yield from _exact(device)


def _exact(device: str) -> Iterator[tuple[str, Any]]:
    """Conditioning the residual on the data, against Proposition 1, which need not."""
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double().to(device)
    count = sum(p.numel() for p in network.parameters())
    covariance = torch.eye(count, dtype=torch.float64, device=device)
    process = ResidualProcess(network, covariance, noise=0.1)
    x = torch.randn(16, 8, dtype=torch.float64, device=device)
    for n in (500, 1000, 2000):
        X = torch.randn(n, 8, dtype=torch.float64, device=device)
        y = X.sum(1)
        runs = {
            "Proposition 1": lambda X=X, y=y: process.approximate(x, X, y),
            "exact": lambda X=X, y=y: process.exact(x, X, y),
        }
        case = f"posterior at 16 points, {n} examples"
        yield case, race(runs, rounds=5, device=device)
