"""Prediction: the network alone, last-layer Laplace by laplace-torch and by us, and with RGPR.

Calls follow each other without waiting; ``ready`` is measured with calls of which each waits for
the answer of the one before. ``floor`` is what reading each
representation once would cost at the bandwidth of a copy, measured beside it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rgpr import RGPR, as_posterior
from rgpr._network.running import capture
from rgpr.posteriors.links import probit

from .networks import NETWORKS, head, laplace, made
from .timing import race

BATCHES = {"cpu": (1, 32, 256), "cuda": (1, 32, 512)}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}
# On a GPU with CUDA graphs: what launching kernels costs is the same for both then. Without trying
# several versions of a kernel: which of them wins changes from one compilation to the next, and
# moves either side by more than RGPR takes.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"options": {"triton.cudagraphs": True, "triton.autotune_pointwise": False}},
}
# Bytes that laplace-torch's Jacobians may take.
ROOM = {"cpu": 2 << 30, "cuda": 24 << 30}


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    for name in reversed(NETWORKS):
        for dtype in DTYPES[device]:
            yield from _network(name, dtype, device)
    sizes = [(100, 512), (250, 1024)] if device == "cpu" else [(100, 512), (1000, 2048)]
    for classes, features in sizes:
        case = f"head, {classes} classes, {features} features, batch 32"
        yield case, closed_form(classes, features, device)


def _network(name: str, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Any]]:
    torch._dynamo.reset()  # or sizes that others had would count as seen
    network, shape = made(name, device)
    x = torch.randn(512, *shape, device=device)
    la = laplace(network, x)
    batches = [(x, torch.arange(512, device=device) % 10)] * 2
    posterior = as_posterior(la).eval().to(dtype)
    models = {
        "RGPR": RGPR(copy.deepcopy(network)),
        "LLL + RGPR": RGPR(la),
        "LLL + RGPR, paper": RGPR(la, residual="paper"),
    }
    for model in models.values():
        model.fit(batches, progress=False).to(dtype)
    network, model = network.to(dtype), models["LLL + RGPR"]
    x, kind = x.to(dtype), str(dtype).removeprefix("torch.")
    zero = torch.zeros(512, dtype=torch.float64, device=device)
    options = OPTIONS[device]
    compiled_network = torch.compile(copy.deepcopy(network), **options)
    compiled = copy.deepcopy(model)
    compiled.compile(**options)
    for batch in reversed(BATCHES[device]):
        b = x[:batch].contiguous()
        z = zero[:batch]
        rows: dict[str, Callable[[], Any]] = {"network": lambda b=b: network(b)}
        if dtype == torch.float32:
            rows["LLL, laplace-torch"] = lambda b=b: la(b)
        rows["LLL"] = lambda b=b, z=z: probit(posterior(b), z)
        for label, extended in models.items():
            rows[label] = lambda b=b, m=extended: m(b)
        case = f"{name}, {kind}, batch {batch}"
        result = race(rows, device=device, latency=True)
        result["network"] |= _floor(network, model, b, device)
        yield f"{case}, eager", result
        yield f"{case}, compiled", _compiled(compiled_network, compiled, b, device)


def _compiled(network: Any, model: Any, x: Tensor, device: str) -> dict[str, Any]:
    rows = {"network": lambda: network(x), "LLL + RGPR": lambda: model(x)}
    return race(rows, device=device, memory=False, latency=True)


def _floor(network: nn.Module, model: RGPR, x: Tensor, device: str) -> dict[str, float]:
    """Bytes of the representations, and the seconds that reading them takes at least."""
    size = lambda h: h.numel() * h.element_size()  # noqa: E731
    reading = capture(network, model._layers, [size] * len(model.layers), x)
    with reading, reading:
        network(x)
    sizes = reading.found
    return {"bytes": sum(sizes), "floor": sum(sizes) / _bandwidth(device)}


def _bandwidth(device: str, size: int = 1 << 28) -> float:
    """Bytes a second that a copy reads and writes, together."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return 2 * size / min(taken)


def closed_form(classes: int, features: int, device: str) -> dict[str, Any]:
    """Our closed form against Jacobians, in as many calls as they need to fit into memory."""
    torch.manual_seed(0)
    network = head(features, classes).to(device)
    x = torch.randn(32, 64, device=device)
    la = laplace(network, x, classes)
    posterior = as_posterior(la).eval()
    zero = torch.zeros(32, dtype=torch.float64, device=device)
    # The Jacobian of one input, and twice as much for products with it.
    one = 3 * 4 * classes**2 * (features + 1)
    size = max(1, min(32, ROOM[device] // one))
    parts = torch.split(x, size)
    calls = f"LLL, laplace-torch, {len(parts)} calls of {size}"
    return race(
        {
            "LLL": lambda: probit(posterior(x), zero),
            calls: lambda: [la(part) for part in parts],
        },
        rounds=5,
        device=device,
        seconds=1,
        long=[calls],
    )
