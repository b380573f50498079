"""Where each microsecond of ``model(x)`` goes: parts of a call, as times and over the bare network.

A signal comes at even steps of time while the call is repeated, and what runs then is counted by
the file of this library that it belongs to. Unlike a tracing profiler this does not slow down what
it measures. The steps are of the clock and not of CPU time, of which an operation on two cores
takes twice as much as it lasts. On a GPU it shows the host's part, which kernels may hide.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rgpr

from .networks import NETWORKS, laplace, made
from .timing import race

LIBRARY = str(Path(rgpr.__file__).parent) + "/"
BATCHES = {"cpu": (1, 256), "cuda": (1, 512)}
# Seconds between signals, and for how many of them a call is repeated.
STEP, SIGNALS = 0.004, 1500
# The first entry whose beginning fits the innermost file of the library says what runs.
PARTS = {
    "_network/guards": "evaluation mode and hooks, on and off",
    "_network/running": "representations taken out of the pass",
    "_network": "checks of the input",
    "residual/variance": "from distances to one variance",
    "residual": "distances of the layers",
    "_backend": "distances of the layers",
    "posteriors/links": "from outputs and variance to probabilities",
    "posteriors": "the base's variance",
    "answers": "from outputs and variance to probabilities",
    "likelihoods": "from outputs and variance to probabilities",
    "": "the rest",
}


@torch.no_grad()
def run(device: str) -> Iterator[tuple[str, Any]]:
    for name in reversed(NETWORKS):
        network, shape = made(name, device)
        x = torch.randn(512, *shape, device=device)
        batches = [(x, torch.arange(512, device=device) % 10)]
        model = rgpr.RGPR(laplace(network, x)).fit(batches, progress=False)
        for size in BATCHES[device]:
            yield f"{name}, batch {size}", parts(network, model, x[:size].contiguous(), device)


def parts(network: Any, model: rgpr.RGPR, x: torch.Tensor, device: str) -> dict[str, Any]:
    """The seconds of each part of a call, and over those of the bare network."""
    whole = race(
        {"the bare network": lambda: network(x), "model(x)": lambda: model(x)},
        device=device,
        memory=False,
    )
    bare, seconds = whole["the bare network"]["seconds"], whole["model(x)"]["seconds"]
    counts = sampled(lambda: model(x))
    total = sum(counts.values())
    for part, count in counts.most_common():
        taken = seconds * count / total
        # The error of a count, over the count.
        whole[part] = {"seconds": taken, "spread": count**-0.5, "ratio": taken / bare}
    return whole


def sampled(call: Callable[[], Any]) -> Counter[str]:
    """How many signals found each part of the call at work."""
    counts: Counter[str] = Counter()

    def count(_: int, frame: FrameType | None) -> None:
        counts[part_of(frame)] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, STEP, STEP)
    try:
        while counts.total() < SIGNALS:
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return counts


def part_of(frame: FrameType | None) -> str:
    """The part of a call that a frame belongs to."""
    within_network = False
    while frame is not None and not frame.f_code.co_filename.startswith(LIBRARY):
        # Not every frame of torch's modules: attributes of our own are looked up there, too.
        within_network |= frame.f_code.co_name == "_call_impl"
        frame = frame.f_back
    if frame is None:
        return PARTS[""]
    if within_network:
        return "the network"
    file = frame.f_code.co_filename.removeprefix(LIBRARY)
    return next(part for start, part in PARTS.items() if file.startswith(start))
