"""A monitor's file: safetensors with a JSON description, written wholly or not at all.

Counts, edges, capital and random state are kept to the last bit, so a monitor that was killed and
loaded gives the same numbers as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...model import RGPR
from ...saving.container import read, write
from ...saving.parts import complete
from .martingale import Martingale
from .performance import Performance
from .ranks import Bins
from .state_checks import check_state, is_count
from .trace import Trace

__all__ = ["Parts", "fingerprint", "load", "run_of", "save"]

_KIND = "monitor"
_BINS = ("edges", "ties", "counts")


@dataclass(frozen=True)
class Parts:
    """All that is kept of a monitor.

    Attributes:
        alpha: Its level.
        nans: How many scores were NaN.
        layers: Names of the layers it watches.
        model: What tells the model from others.
        generator: Source of its random numbers.
        bins: Of the score and of each layer.
        martingale: Of the score and of each layer.
        trace: What is kept for the picture.
        performance: What labels said.
    """

    alpha: float
    nans: int
    layers: list[str]
    model: str
    generator: np.random.Generator
    bins: list[Bins]
    martingale: Martingale
    trace: Trace
    performance: Performance


def save(path: str | os.PathLike[str], parts: Parts, run: Mapping[str, Any] | None = None) -> None:
    """Write the parts.

    Args:
        path: The file.
        parts: The parts.
        run: What is to be known of the run that read last, for JSON; see :func:`run_of`.
    """
    arrays: dict[str, NDArray[Any]] = {
        "trace": parts.trace.points,
        "performance": parts.performance.sums,
        "labelled": parts.performance.runs,
    }
    arrays |= {f"martingale.{name}": array for name, array in parts.martingale.state.items()}
    for number, each in enumerate(parts.bins):
        arrays |= {f"bins.{number}.{name}": getattr(each, name) for name in _BINS}
    about = {
        "kind": _KIND,
        "alpha": parts.alpha,
        "nans": parts.nans,
        "layers": parts.layers,
        "model": parts.model,
        "random": parts.generator.bit_generator.state,
        "stride": parts.trace.stride,
        "window": parts.performance.window,
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    write(path, tensors, about if run is None else {**about, "run": run})


def fingerprint(model: RGPR) -> str:
    """What tells this model and its calibration from others: its references and what it reads."""
    references = model._reference_scores().detach().cpu().double().numpy()
    named = "\n".join(model.layers).encode()
    return hashlib.sha256(named + references.tobytes()).hexdigest()


def run_of(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """What :func:`save` got as ``run``; ``None`` for any other file."""
    about = read(path)[1]
    run = about.get("run") if isinstance(about, Mapping) else None
    if not isinstance(run, Mapping):
        return None
    whole = [run.get(name) for name in ("rows", "before")]
    if not isinstance(run.get("settings"), Mapping) or not all(map(is_count, whole)):
        raise ValueError(
            f"{path} is damaged: it does not say how far the run that it is of had come; pass "
            "--restart to begin this run again"
        )
    return run


def load(path: str | os.PathLike[str], model: str) -> Parts:
    """The parts that :func:`save` wrote.

    Args:
        path: The file.
        model: What tells the model from others.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, no monitor's, or of another model.
    """
    tensors, about, _ = read(path)
    if not isinstance(about, Mapping) or about.get("kind") != _KIND:
        raise ValueError(
            f"{path} holds no monitor but perhaps a model; load models with rgpr.load, and "
            "monitors from what Monitor.save wrote"
        )
    if about.get("model") != model:
        raise ValueError(
            f"{path} was saved with another model or another calibration; pass the model it "
            "watched, as rgpr.load gives it, or begin with a new Monitor(model)"
        )
    with complete(path, "go on from a copy, or begin with a new Monitor(model)"):
        return _put_together(tensors, about)


def _put_together(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> Parts:
    check_state(tensors, about)
    arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    generator = np.random.default_rng()
    generator.bit_generator.state = about["random"]
    bins = [
        Bins(*(arrays[f"bins.{number}.{name}"] for name in _BINS))
        for number in range(1 + len(about["layers"]))
    ]
    states = {name: arrays[f"martingale.{name}"] for name in Martingale.STATE}
    return Parts(
        about["alpha"],
        about["nans"],
        about["layers"],
        about["model"],
        generator,
        bins,
        Martingale.of_state(states),
        Trace(arrays["trace"], about["stride"]),
        # Files of earlier versions do not say which inputs have labels.
        Performance(about["window"], arrays["performance"], arrays.get("labelled")),
    )
