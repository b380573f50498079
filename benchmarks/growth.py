"""Growth: time and memory of a prediction or a fit against classes, layers, width, batch, examples.

Beside it stand the bare network, laplace-torch's own call while its Jacobians fit into memory, and
pytorch-ood's KNN and ViM, each with its pass through the network. The exponent is the slope between
the logarithms over the larger half of the sizes, where what is fixed no longer counts. Memory is
the most that tensors take during a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rgpr import RGPR

from .networks import head, laplace
from .timing import race, slope, tensor_memory

SIZES = {
    "classes": (10, 30, 100, 300, 1000, 3000, 10000),
    "layers": (1, 2, 5, 10, 20, 50),
    "width": (64, 128, 256, 512, 1024, 2048),
    "batch": (32, 128, 512, 2048, 8192),
    "examples": (512, 2048, 8192, 32768),
}
# Up to so many classes laplace-torch's Jacobians of 256 inputs fit into memory.
MOST_JACOBIANS = 30


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    for axis, sizes in SIZES.items():
        points = {}
        for size in sizes:
            torch.manual_seed(0)
            runs = CASES[axis](size, device)
            points[size] = race(runs, rounds=5, device=device, seconds=4)
            if device == "cpu":
                for name, run_once in runs.items():
                    points[size][name]["memory"] = tensor_memory(run_once)
        yield (
            axis,
            {
                "sizes": points,
                "exponents": _exponents(points, "seconds"),
                "memory exponents": _exponents(points, "memory"),
            },
        )


def _exponents(points: dict[int, Any], what: str) -> dict[str, float]:
    """Of each contestant, over the larger half of the sizes that it was measured at."""
    found = {}
    for name in dict.fromkeys(name for point in points.values() for name in point):
        sizes = [size for size, point in points.items() if name in point]
        half = sizes[max(0, len(sizes) // 2 - (len(sizes) % 2 == 0)) :]
        if len(half) > 1:
            found[name] = slope(half, [points[size][name][what] for size in half])
    return found


def _predict(network: nn.Module, x: torch.Tensor, base: Any = None) -> dict[str, Callable[[], Any]]:
    y = torch.arange(len(x), device=x.device) % 10
    model = RGPR(network if base is None else base).fit([(x, y)], progress=False)
    return {"network": lambda: network(x), "RGPR": lambda: model(x)}


def _classes(size: int, device: str) -> dict[str, Callable[[], Any]]:
    network = head(512, size).to(device).eval()
    x = torch.randn(256, 64, device=device)
    y = torch.arange(256, device=device) % size
    model = RGPR(network).fit([(x, y)], progress=False)
    runs: dict[str, Callable[[], Any]] = {"network": lambda: network(x), "RGPR": lambda: model(x)}
    if size <= MOST_JACOBIANS:
        la = laplace(network, x, size)
        ours = RGPR(la).fit([(x, y)], progress=False)
        runs |= {"LLL + RGPR": lambda: ours(x), "laplace-torch": lambda: la(x)}
    return runs


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
    network, x = _deep(2, 256, device), torch.randn(size, 64, device=device)
    known = torch.randn(2048, 64, device=device)
    detectors = {name: made(network, known) for name, made in DETECTORS.items()}
    scores = {name: lambda d=detector: d[0](d[1](x)) for name, detector in detectors.items()}
    return _predict(network, x) | scores


def _examples(size: int, device: str) -> dict[str, Callable[[], Any]]:
    """Fits on so many examples, and what one batch of 256 takes afterwards."""
    network = _deep(2, 256, device)
    x, known = torch.randn(256, 64, device=device), torch.randn(size, 64, device=device)
    y = torch.arange(256) % 10
    loader = [(part, y) for part in known.split(256)]
    model = RGPR(network)
    runs: dict[str, Callable[[], Any]] = {"fit": lambda: model.fit(loader, progress=False)}
    for name, made in DETECTORS.items():
        runs[f"fit, {name}"] = lambda m=made: m(network, known)
        score, encode = made(network, known)
        runs[f"score, {name}"] = lambda s=score, e=encode: s(e(x))
    runs["fit"]()
    return runs | {"score": lambda: model.score(x)}


Detector = tuple[Callable[[torch.Tensor], Any], nn.Module]


def _knn(network: nn.Module, known: torch.Tensor) -> Detector:
    from pytorch_ood.detector import KNN

    encode = network[:-1]  # type: ignore[index]
    detector = KNN(None).fit_features(encode(known), torch.zeros(len(known), dtype=torch.long))
    return detector.predict_features, encode


def _vim(network: nn.Module, known: torch.Tensor) -> Detector:
    from pytorch_ood.detector import ViM

    encode, last = network[:-1], network[-1]  # type: ignore[index]
    detector = ViM(None, 64, last.weight.detach(), last.bias.detach())
    detector.fit_features(encode(known), torch.zeros(len(known), dtype=torch.long))
    return detector.predict_features, encode


# By their names, what fits a detector of pytorch-ood to known inputs.
DETECTORS = {"KNN": _knn, "ViM": _vim}
CASES = {
    "classes": _classes,
    "layers": _layers,
    "width": _width,
    "batch": _batch,
    "examples": _examples,
}
