"""Growth: time and memory against classes, layers, width, batch, examples and workers.

Beside a prediction or a fit stand the bare network, laplace-torch's own call while its Jacobians
fit into memory, and pytorch-ood's KNN and ViM, each with its pass through the network. Against
workers it is what one process does with what they hand in: states to merge, or features to fit to.
The exponent is the slope between the logarithms over the larger half of the sizes, where what is
fixed no longer counts. Memory is the most that tensors take during a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rgpr import RGPR, FitState

from .networks import head, laplace
from .timing import race, slope, tensor_memory

SIZES = {
    "classes": (10, 30, 100, 300, 1000, 3000, 10000),
    "layers": (1, 2, 5, 10, 20, 50),
    "width": (64, 128, 256, 512, 1024, 2048),
    "batch": (32, 128, 512, 2048, 8192),
    "examples": (512, 2048, 8192, 32768),
    "workers": (1, 4, 16, 64),
}
# laplace-torch's Jacobians have so many numbers at the most: inputs, by classes, by weights.
MOST_JACOBIANS = 256 * 30 * 15_390
# Inputs that detectors are fitted to where they are not what grows.
KNOWN = 2048
# Examples that each worker hands in.
SHARD = 512

Runs = dict[str, Callable[[], Any]]


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
                "exponents": exponents(points, "seconds"),
                "memory exponents": exponents(points, "memory"),
            },
        )


def exponents(points: dict[int, Any], what: str) -> dict[str, float]:
    """Of each contestant, over the larger half of the sizes that it was measured at."""
    found = {}
    for name in dict.fromkeys(name for point in points.values() for name in point):
        sizes = [size for size, point in points.items() if what in point.get(name, {})]
        half = larger_half(sizes)
        if len(half) > 1:
            found[name] = slope(half, [points[size][name][what] for size in half])
    return found


def larger_half(sizes: list[int]) -> list[int]:
    """The sizes that an exponent is taken over."""
    return sizes[max(0, len(sizes) // 2 - (len(sizes) % 2 == 0)) :]


def _predict(network: nn.Module, x: torch.Tensor, base: Any = None) -> Runs:
    y = torch.arange(len(x), device=x.device) % 10
    model = RGPR(network if base is None else base).fit([(x, y)], progress=False)
    return {"network": lambda: network(x), "RGPR": lambda: model(x)}


def _classes(size: int, device: str) -> Runs:
    network = head(512, size).to(device).eval()
    x = torch.randn(256, 64, device=device)
    # Every class has an input, and with it a mean.
    known = torch.randn(max(KNOWN, size), 64, device=device)
    labels = torch.arange(len(known), device=device) % size
    loader = list(zip(known.split(256), labels.split(256), strict=True))
    model = RGPR(network).fit(loader, progress=False)
    runs: Runs = {"network": lambda: network(x), "RGPR": lambda: model(x)}
    return runs | _laplace(network, x, size) | _scores(network, x, known)


def _laplace(network: nn.Module, x: torch.Tensor, classes: int = 10) -> Runs:
    """laplace-torch's last-layer Laplace and ours below RGPR, where its Jacobians fit."""
    weights = sum(each.numel() for each in network[-1].parameters())  # type: ignore[index]
    if len(x) * classes * weights > MOST_JACOBIANS:
        return {}
    la = laplace(network, x, classes)
    ours = _predict(network, x, la)["RGPR"]
    return {"LLL + RGPR": ours, "laplace-torch": lambda: la(x)}


def _scores(network: nn.Module, x: torch.Tensor, known: torch.Tensor | None = None) -> Runs:
    """pytorch-ood's detectors, fitted to these inputs."""
    known = torch.randn(KNOWN, 64, device=x.device) if known is None else known
    detectors = {name: made(network, known) for name, made in DETECTORS.items()}
    return {name: lambda d=detector: d[0](d[1](x)) for name, detector in detectors.items()}


def _deep(layers: int, width: int, device: str) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10)).to(device).eval()


def _layers(size: int, device: str) -> Runs:
    network, x = _deep(size, 256, device), torch.randn(256, 64, device=device)
    return _predict(network, x) | _laplace(network, x) | _scores(network, x)


def _width(size: int, device: str) -> Runs:
    network, x = _deep(2, size, device), torch.randn(256, 64, device=device)
    runs = _predict(network, x) | _laplace(network, x)
    if "LLL + RGPR" not in runs:
        runs["LLL + RGPR"] = _predict(network, x, laplace(network, x))["RGPR"]
    return runs | _scores(network, x)


def _batch(size: int, device: str) -> Runs:
    network, x = _deep(2, 256, device), torch.randn(size, 64, device=device)
    return _predict(network, x) | _laplace(network, x) | _scores(network, x)


def _examples(size: int, device: str) -> Runs:
    """Fits on so many examples, and what one batch of 256 takes afterwards."""
    network = _deep(2, 256, device)
    x, known = torch.randn(256, 64, device=device), torch.randn(size, 64, device=device)
    y = torch.arange(256) % 10
    loader = [(part, y) for part in known.split(256)]
    model = RGPR(network)
    runs: Runs = {"fit": lambda: model.fit(loader, progress=False)}
    for name, made in DETECTORS.items():
        runs[f"fit, {name}"] = lambda m=made: m(network, known)
        score, encode = made(network, known)
        runs[f"score, {name}"] = lambda s=score, e=encode: s(e(x))
    runs["fit"]()
    return runs | {"score": lambda: model.score(x)}


def _workers(size: int, device: str) -> Runs:
    """Merge what so many workers learned of 512 examples each, and fit to it."""
    network, x = _deep(2, 256, device), torch.randn(SHARD, 64, device=device)
    model, y = RGPR(network), torch.arange(SHARD, device=device) % 10
    states = [FitState(model).update(x + number, y) for number in range(size)]

    def merge() -> RGPR:
        total = FitState(model)
        for state in states:
            total.merge(state)
        return model.fit(total, progress=False)

    runs: Runs = {"merge and fit": merge}
    shards = torch.cat([x + number for number in range(size)])
    for name, made in DETECTORS.items():
        runs[f"fit, {name}"] = lambda m=made: m(network, shards)
    return runs


Detector = tuple[Callable[[torch.Tensor], Any], nn.Module]


def _knn(network: nn.Module, known: torch.Tensor) -> Detector:
    from pytorch_ood.detector import KNN

    encode = network[:-1]  # type: ignore[index]
    detector = KNN(None).fit_features(encode(known), torch.zeros(len(known), dtype=torch.long))
    return detector.predict_features, encode


def _vim(network: nn.Module, known: torch.Tensor) -> Detector:
    from pytorch_ood.detector import ViM

    encode, last = network[:-1], network[-1]  # type: ignore[index]
    axes = min(64, last.in_features // 2)  # some have to be left for what it measures
    detector = ViM(None, axes, last.weight.detach(), last.bias.detach())
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
    "workers": _workers,
}
