"""Fit against one bare pass over the same loader; and what it keeps of more batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rgpr import RGPR

from .networks import NETWORKS, made
from .timing import race

# Of how many rows, and how many: on a GPU as many as 50000 images take.
BATCHES = {"cpu": (32, 100), "cuda": (512, 98)}
FEWER = {("cpu", "ResNet-18"): 24}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    for name in reversed(NETWORKS):
        size, count = BATCHES[device]
        count = FEWER.get((device, name), count)
        for dtype in DTYPES[device]:
            network, shape = made(name, device)
            network = network.to(dtype)
            # As loaders give them.
            x, y = torch.randn(count * size, *shape).to(dtype), torch.arange(size) % 10
            loader = [(part, y) for part in (x.pin_memory() if device == "cuda" else x).split(size)]

            def bare(network=network, loader=loader) -> None:
                for x, _ in loader:
                    network(x.to(device, non_blocking=True))

            runs = {"bare pass": bare}
            for residual in ("onset", "paper"):
                model = RGPR(network, residual=residual)
                runs[residual] = lambda m=model, loader=loader: m.fit(loader, progress=False)
            kind = str(dtype).removeprefix("torch.")
            case = f"{name}, {kind}, {count} batches of {size}"
            result = race(runs, rounds=5, device=device)
            if device == "cuda":  # where memory can be watched
                runs = {
                    "four times as many": lambda m=model, b=loader: m.fit(4 * b, progress=False)
                }
                result |= race(runs, rounds=2, device=device)
            yield case, result
