"""Small networks and small batches, where launching kernels takes longer than running them.

These few cases have a target, as a ratio over the bare network in the same mode. On a GPU they take
about a minute, most of which is compiling. They are measured with recorded calls, as
``RGPR_RECORD=1`` in the environment switches them on. The other benchmarks take what the
environment says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rgpr import RGPR
from rgpr._backend import recording

from .networks import laplace, made
from .prediction import OPTIONS
from .timing import race

# Network, batch, whether it is compiled, and how many times as long as the network it may take.
TARGETS = {
    "cpu": [
        ("MLP 784-256-256", 256, False, 2.0),
        ("LeNet", 256, False, 1.1),
        ("ResNet-18", 1, False, 1.1),
    ],
    "cuda": [
        ("MLP 784-256-256", 512, False, 4.0),
        ("MLP 784-256-256", 512, True, 1.4),
        ("LeNet", 512, False, 2.5),
        ("LeNet", 512, True, 1.3),
        ("ResNet-18", 32, False, 1.3),
        ("ResNet-18", 1, False, 1.4),
        ("ResNet-18", 1, True, 1.25),
    ],
}


@contextmanager
def recorded() -> Iterator[None]:
    """Recorded calls inside, whatever the environment says."""
    before, recording._enabled = recording._enabled, True
    recording.recorder_of.cache_clear()
    try:
        yield
    finally:
        recording._enabled = before
        recording.recorder_of.cache_clear()


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    with recorded():
        yield from _cases(device)


def _cases(device: str) -> Iterator[tuple[str, Any]]:
    kind = torch.device(device).type
    models: dict[str, tuple[Any, RGPR, torch.Tensor]] = {}
    for name, batch, compiled, target in TARGETS[kind]:
        if name not in models:
            models[name] = _fitted(name, device)
        network, model, x = models[name]
        x = x[:batch].contiguous()
        if compiled:
            torch._dynamo.reset()
            network, model = copy.deepcopy(network), copy.deepcopy(model)
            network = torch.compile(network, **OPTIONS[kind])
            model.compile(**OPTIONS[kind])
        rows = {
            "network": lambda n=network, x=x: n(x),
            "LLL + RGPR": lambda m=model, x=x: m(x),
        }
        result = race(rows, device=device, seconds=5, memory=False, latency=True)
        result["LLL + RGPR"]["target"] = target
        yield f"{name}, batch {batch}, {'compiled' if compiled else 'eager'}", result


def _fitted(name: str, device: str) -> tuple[Any, RGPR, torch.Tensor]:
    network, shape = made(name, device)
    x = torch.randn(512, *shape, device=device)
    model = RGPR(laplace(network, x))
    model.fit([(x, torch.arange(512, device=device) % 10)], progress=False)
    return network, model, x
