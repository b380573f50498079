"""Fit against one bare pass over the same batches; and what it keeps of more of them."""

from __future__ import annotations

from typing import Any

import torch

from rgpr import RGPR

from .networks import NETWORKS, made
from .timing import race

BATCHES = {"cpu": (32, 8), "cuda": (512, 98)}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}


@torch.no_grad()
def run(device: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    size, count = BATCHES[device]
    for name in NETWORKS:
        for dtype in DTYPES[device]:
            network, shape = made(name, device)
            network = network.to(dtype)
            x = torch.randn(size, *shape, device=device, dtype=dtype)
            y = torch.arange(size) % 10
            loader = [(x, y)] * count

            def bare(network=network, loader=loader) -> None:
                for x, _ in loader:
                    network(x)

            runs = {"bare pass": bare}
            for residual in ("adaptive", "paper"):
                model = RGPR(network, residual=residual)
                runs[residual] = lambda m=model, loader=loader: m.fit(loader, progress=False)
            kind = str(dtype).removeprefix("torch.")
            case = f"{name}, {kind}, {count} batches of {size}"
            results[case] = race(runs, rounds=7, device=device)
            if device == "cuda":  # where memory can be watched
                runs = {
                    "four times as many": lambda m=model, b=loader: m.fit(4 * b, progress=False)
                }
                results[case] |= race(runs, rounds=3, device=device)
    return results
