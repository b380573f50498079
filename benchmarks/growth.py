"""Growth: seconds of a prediction or a fit against classes, layers, width, batch and examples.

The exponent is the slope between the logarithms over the larger half of the sizes, where what is
fixed no longer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rgpr import RGPR

from .networks import head, laplace
from .timing import race, slope

SIZES = {
    "classes": (10, 30, 100, 300, 1000, 3000, 10000),
    "layers": (1, 2, 5, 10, 20, 50),
    "width": (64, 128, 256, 512, 1024, 2048),
    "batch": (32, 128, 512, 2048, 8192),
    "examples": (512, 2048, 8192, 32768),
}


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    for axis, sizes in SIZES.items():
        points = {}
        for size in sizes:
            torch.manual_seed(0)
            points[size] = race(CASES[axis](size, device), rounds=5, device=device, seconds=4)
        half = list(sizes)[len(sizes) // 2 - (len(sizes) % 2 == 0) :]
        exponents = {
            name: slope(half, [points[size][name]["seconds"] for size in half])
            for name in points[sizes[0]]
        }
        yield axis, {"sizes": points, "exponents": exponents}


def _predict(network: nn.Module, x: torch.Tensor, base: Any = None) -> dict[str, Callable[[], Any]]:
    y = torch.arange(len(x), device=x.device) % 10
    model = RGPR(network if base is None else base).fit([(x, y)], progress=False)
    return {"network": lambda: network(x), "RGPR": lambda: model(x)}


def _classes(size: int, device: str) -> dict[str, Callable[[], Any]]:
    network = head(512, size).to(device).eval()
    x = torch.randn(256, 64, device=device)
    y = torch.arange(256, device=device) % size
    model = RGPR(network).fit([(x, y)], progress=False)
    return {"network": lambda: network(x), "RGPR": lambda: model(x)}


def _deep(layers: int, width: int, device: str) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10)).to(device).eval()


def _layers(size: int, device: str) -> dict[str, Callable[[], Any]]:
    return _predict(_deep(size, 256, device), torch.randn(256, 64, device=device))


def _width(size: int, device: str) -> dict[str, Callable[[], Any]]:
    network, x = _deep(2, size, device), torch.randn(256, 64, device=device)
    runs = _predict(network, x)
    return runs | {"LLL + RGPR": _predict(network, x, laplace(network, x))["RGPR"]}


def _batch(size: int, device: str) -> dict[str, Callable[[], Any]]:
    return _predict(_deep(2, 256, device), torch.randn(size, 64, device=device))


def _examples(size: int, device: str) -> dict[str, Callable[[], Any]]:
    network = _deep(2, 256, device)
    x = torch.randn(256, 64, device=device)
    loader = [(x, torch.arange(256) % 10)] * (size // 256)
    model = RGPR(network)
    return {"fit": lambda: model.fit(loader, progress=False)}


CASES = {
    "classes": _classes,
    "layers": _layers,
    "width": _width,
    "batch": _batch,
    "examples": _examples,
}
