"""The kernel matrix in cache-sized blocks against the plain n x m x N broadcast."""

from __future__ import annotations

from typing import Any

import torch

from rgpr.kernels import dscs, dscs_gram

from .timing import race


@torch.no_grad()
def run() -> dict[str, Any]:
    torch.manual_seed(0)
    X = torch.randn(1000, 100)
    return {
        "1000 x 1000 points, 100 dimensions": race(
            {"blocks": lambda: dscs_gram(X), "broadcast": lambda: dscs(X[:, None], X)}, rounds=5
        )
    }
