"""Small networks and small batches, where launching kernels takes longer than running them.

These few cases have a target, as a ratio over the bare network in the same mode: eager, compiled or
as a file that ONNX Runtime reads. Beside the plain call stands ``model.predict``, which gives all
answers as arrays; the file gives score and p-value anyway. On a GPU they take about a minute, most
of which is compiling.
They are measured with recorded calls, as ``RGPR_RECORD=1`` in the environment switches them on. The
other benchmarks take what the environment says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rgpr import RGPR, export
from rgpr._backend import recording

from .networks import laplace, made
from .prediction import OPTIONS
from .timing import race

# The contestant that gives everything at once.
PREDICT = "LLL + RGPR, predict"
# Network, batch, how it runs, and how many times as long as the network it may take.
TARGETS = {
    "cpu": [
        ("MLP 784-256-256", 256, "eager", 2.0),
        ("LeNet", 256, "eager", 1.1),
        ("LeNet", 1, "ONNX Runtime", 1.15),
        ("ResNet-18", 1, "eager", 1.1),
        ("ResNet-18", 1, "ONNX Runtime", 1.15),
    ],
    "cuda": [
        ("MLP 784-256-256", 512, "eager", 4.0),
        ("MLP 784-256-256", 512, "compiled", 1.4),
        ("LeNet", 512, "eager", 2.5),
        ("LeNet", 512, "compiled", 1.3),
        ("ResNet-18", 32, "eager", 1.3),
        ("ResNet-18", 1, "eager", 1.4),
        ("ResNet-18", 1, "compiled", 1.25),
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
    for name, batch, mode, target in TARGETS[kind]:
        if name not in models:
            models[name] = _fitted(name, device)
        network, model, x = models[name]
        x = x[:batch].contiguous()
        if mode == "compiled":
            torch._dynamo.reset()
            network, model = copy.deepcopy(network), copy.deepcopy(model)
            network = torch.compile(network, **OPTIONS[kind])
            model.compile(**OPTIONS[kind])
        if mode == "ONNX Runtime":
            network, model = _sessions(network, model, x)
        rows = {
            "network": lambda n=network, x=x: n(x),
            "LLL + RGPR": lambda m=model, x=x: m(x),
        }
        if mode != "ONNX Runtime":
            rows[PREDICT] = lambda m=model, x=x: m.predict(x, progress=False)
        result = race(rows, rounds=21, device=device, seconds=15, memory=False, latency=True)
        result["LLL + RGPR"]["target"] = target
        yield f"{name}, batch {batch}, {mode}", result


def _fitted(name: str, device: str) -> tuple[Any, RGPR, torch.Tensor]:
    network, shape = made(name, device)
    x = torch.randn(512, *shape, device=device)
    model = RGPR(laplace(network, x))
    model.fit([(x, torch.arange(512, device=device) % 10)], progress=False)
    held_out = torch.randn_like(x)
    model.calibrate([(held_out, network(held_out).argmax(1))], progress=False)
    return network, model, x


def _sessions(network: Any, model: RGPR, x: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Both as ONNX files in ONNX Runtime; that of the model gives score and p-value, too."""
    import onnxruntime

    example = torch.cat([x, x])  # one row would be taken for a constant
    options = onnxruntime.SessionOptions()
    # The threads of one session would go on turning while the other is measured.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    runs = []
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of dynamic dimensions
        batch = {0: torch.export.Dim("batch")}
        bare = torch.onnx.export(
            network, (example,), dynamo=True, dynamic_shapes=(batch,), verbose=False
        )
        assert bare is not None
        bare.optimize()
        bare.save(Path(folder) / "network.onnx")
        export.onnx(model, Path(folder) / "model.onnx", example)
        for name in ("network", "model"):
            session = onnxruntime.InferenceSession(
                str(Path(folder) / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
            )
            [given] = session.get_inputs()
            runs.append(lambda x, s=session, name=given.name: s.run(None, {name: x.numpy()}))
    return runs
