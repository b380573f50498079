"""All answers for many inputs, from one pass over them; see :meth:`rgpr.RGPR.predict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._network.batches import Batch
from .._network.checks import network_dtype_device
from .._network.loaders import inputs, on_device
from .._network.sources import Batches
from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood
from ..posteriors.gaussian import Gaussian
from . import conformal
from .probabilities import answer, deviations, log_probabilities
from .score import score

__all__ = ["Predictions", "Promises", "class_set", "everything", "interval", "predict"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, repr=False, eq=False)
class Predictions:
    """What a model says about ``N`` inputs, as numpy arrays; ``None`` where there is no answer.

    Attributes:
        score: How strange each input is, ``(N,)``.
        probabilities: ``(N, C)``, of classes or labels; so are the next two.
        label: The most probable class ``(N,)``, or which labels are there ``(N, C)``; -1 for an
            input that holds a NaN.
        confidence: The largest probability of any answer, ``(N,)``.
        mean: ``(N, C)``, of a regression; so are the next two.
        variance: The variance of the noise-free function, ``(N, C)``.
        interval: Lower and upper bounds of the target, each ``(N, C)``, of a model that was
            calibrated with targets.
        p_value: ``(N,)``, of a calibrated model.
        flag: Which inputs are too strange, ``(N,)``, of a calibrated model.
        set: Which classes to expect, ``(N, C)``, of a model that was calibrated with labels.
        index: The index of the frame that the inputs came in.
    """

    score: Array
    probabilities: Array | None = None
    label: Array | None = None
    confidence: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    interval: tuple[Array, Array] | None = None
    p_value: Array | None = None
    flag: Array | None = None
    set: Array | None = None
    index: Any = None

    def __len__(self) -> int:
        return len(self.score)

    def to_frame(self) -> Any:
        """A pandas frame with a row for each input, and its index if the inputs were a frame.

        What has several numbers for an input has as many columns, numbered from 0.
        """
        import pandas as pd  # type: ignore[import-untyped]

        columns: dict[str, Array] = {}
        for name, array in self._arrays():
            if array.ndim == 1:
                columns[name] = array
            else:
                columns |= {f"{name}_{i}": array[:, i] for i in range(array.shape[1])}
        return pd.DataFrame(columns, index=self.index)

    def __repr__(self) -> str:
        held = [f"{name} {array.shape}" for name, array in self._arrays()]
        return f"Predictions of {len(self)} inputs: {', '.join(held)}"

    def _arrays(self) -> list[tuple[str, Array]]:
        """What there is, the two sides of an interval under names of their own."""
        found: list[tuple[str, Array]] = []
        for name in (field.name for field in fields(self) if field.name != "index"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                found += zip(("low", "high"), value, strict=True)
            elif value is not None:
                found.append((name, value))
        return found


@dataclass(frozen=True)
class Promises:
    """What a calibration knows.

    Attributes:
        references: Scores of the held-out inputs, in ascending order; ``None`` before.
        alpha: The level of flags.
        given: The model as the fit or the user left it, by which sets and intervals are ranked.
        bound: The largest conformal score inside of them; ``None`` without targets.
    """

    references: Tensor | None
    alpha: float
    given: Extension
    bound: Tensor | None


@torch.no_grad()
def predict(
    extension: Extension, promises: Promises, data: Iterable[Any], progress: bool
) -> Predictions:
    """Everything that is known of the inputs in ``data``; the network runs once on each batch.

    Args:
        extension: The base, its residual and the temperature.
        promises: What a calibration knows.
        data: Batches, or anything that can be cut into them.
        progress: Show a progress bar where there is a terminal.
    """
    device = network_dtype_device(extension.posterior.network)[1]
    found: dict[str, list[Tensor]] = {}
    network = extension.posterior.network
    for x in inputs(data, network, progress=progress, description="rgpr predict"):
        for name, rows in _of_batch(extension, promises, on_device(x, device)).items():
            found.setdefault(name, []).append(rows.cpu())
    arrays: dict[str, Any] = {name: _array(torch.cat(parts)) for name, parts in found.items()}
    if "low" in arrays:
        arrays["interval"] = arrays.pop("low"), arrays.pop("high")
    return Predictions(**arrays, index=data.index if isinstance(data, Batches) else None)


def _of_batch(extension: Extension, promises: Promises, x: Batch) -> Mapping[str, Tensor]:
    reading: Reading[Gaussian] = extension.read(x)
    likelihood = extension.likelihood
    answers = everything(extension, reading, promises.references, diagonal=True)
    # A model that was not calibrated gives no p-value.
    names = [name.replace("covariance", "variance") for name in likelihood.answers]
    found = dict(zip((*names, "score", "p_value"), answers, strict=False))
    if isinstance(likelihood, LabelLikelihood):
        p = found["probabilities"]
        found["confidence"] = likelihood.confidence(p)
        unknown = p.isnan().any(1)
        label = likelihood.prediction(p)
        found["label"] = torch.where(unknown.reshape(-1, *[1] * (label.dim() - 1)), -1, label)
    if "p_value" in found:
        found["flag"] = (found["p_value"] <= promises.alpha) | found["p_value"].isnan()
    if promises.bound is not None and likelihood.name == "classification":
        found["set"] = class_set(promises.given, reading, promises.bound)
    elif promises.bound is not None:
        found["low"], found["high"] = interval(promises.given, reading, promises.bound)
    return found


def _array(rows: Tensor) -> Array:
    if rows.dtype == torch.bfloat16:  # which numpy does not know
        rows = rows.float()
    array: Array = rows.numpy()
    return array


def everything(
    extension: Extension,
    reading: Reading[Gaussian],
    references: Tensor | None,
    diagonal: bool = False,
) -> tuple[Tensor, ...]:
    """What a plain call returns, the score, and the p-value if there are references."""
    found = answer(extension, reading, diagonal=diagonal)
    strange = score(extension, reading)
    answers = (found,) if isinstance(found, Tensor) else found
    if references is None:
        return (*answers, strange)
    return (*answers, strange, conformal.p_values(strange, references))


def class_set(given: Extension, reading: Reading[Gaussian], bound: Tensor) -> Tensor:
    """The alternatives on the last axis whose conformal score is within the bound, as booleans."""
    return conformal.inside(log_probabilities(given, reading), bound)


def interval(given: Extension, reading: Reading[Gaussian], bound: Tensor) -> tuple[Tensor, Tensor]:
    """The targets whose conformal score is within the bound: their ends, ``(B, C)`` each.

    For several labels they are booleans: what is surely there, and what may be.
    """
    if isinstance(given.likelihood, LabelLikelihood):
        without, there = class_set(given, reading, bound).unbind(-1)
        return ~without, there
    deviation = deviations(given, reading)
    limit = deviation.isinf()
    width = torch.where(limit, torch.inf, bound * deviation)  # also where the bound is zero
    mean = reading.output.mean.double()
    low, high = (torch.where(limit, 0.0, mean) + side * width for side in (-1, 1))
    return low, high
