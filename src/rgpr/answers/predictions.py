"""All answers for many inputs, from one pass over them; see :meth:`rgpr.RGPR.predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from .._network.batches import Batch
from .._network.checks import network_dtype_device
from .._network.loaders import inputs, on_device
from .._network.sources import Batches
from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood, Likelihood
from ..posteriors.gaussian import Gaussian
from . import conformal
from .probabilities import answer, deviations, log_probabilities
from .score import score

__all__ = [
    "Predictions",
    "Promises",
    "Ranks",
    "Said",
    "SaidByGraph",
    "SaidByReading",
    "class_set",
    "everything",
    "interval",
    "predict",
    "ranks",
]

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


# What sets and intervals are made of: log-probabilities, or a mean and standard deviations.
Ranks = tuple[Tensor, ...]


class Said(Protocol):
    """What one pass says about a batch of ``B`` inputs: all that answers are made of."""

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """What a plain call returns, with variances for covariances."""

    @property
    def score(self) -> Tensor:
        """How strange each input is, ``(B,)``."""

    @property
    def ranks(self) -> Ranks:
        """What :func:`ranks` gives."""


@dataclass(frozen=True)
class SaidByReading:
    """:class:`Said`, each part made of a pass through the network when it is asked for.

    Attributes:
        extension: The base, its residual and the temperature.
        given: Gives the model as the fit or the user left it, by which sets and intervals are
            ranked.
        reading: The pass.
    """

    extension: Extension
    given: Callable[[], Extension]
    reading: Reading[Gaussian]

    @property
    def answers(self) -> tuple[Tensor, ...]:
        found = answer(self.extension, self.reading, diagonal=True)
        return (found,) if isinstance(found, Tensor) else found

    @property
    def score(self) -> Tensor:
        return score(self.extension, self.reading)

    @property
    def ranks(self) -> Ranks:
        return ranks(self.given(), self.reading)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, for a graph to give."""
        return (*self.answers, self.score, *self.ranks)


@dataclass(frozen=True)
class SaidByGraph:
    """:class:`Said`, by a compiled graph, which gives all parts at once."""

    answers: tuple[Tensor, ...]
    score: Tensor
    ranks: Ranks

    @classmethod
    def of(cls, likelihood: Likelihood, tensors: tuple[Tensor, ...]) -> Self:
        """From :attr:`SaidByReading.tensors`."""
        count = len(likelihood.answers)
        # The score is given away as it is, and torch's CUDA graphs write their answers anew at
        # every call.
        return cls(tensors[:count], tensors[count].clone(), tensors[count + 1 :])


@dataclass(frozen=True)
class Promises:
    """What a calibration knows.

    Attributes:
        references: Scores of the held-out inputs, in ascending order; ``None`` before.
        alpha: The level of flags.
        bound: The largest conformal score inside of sets and intervals; ``None`` without targets.
    """

    references: Tensor | None
    alpha: float
    bound: Tensor | None


@torch.no_grad()
def predict(
    say: Callable[[Batch], Said],
    extension: Extension,
    promises: Promises,
    data: Iterable[Any],
    progress: bool,
) -> Predictions:
    """Everything that is known of the inputs in ``data``; the network runs once on each batch.

    Args:
        say: What one pass says about a batch.
        extension: The base, its residual and the temperature.
        promises: What a calibration knows.
        data: Batches, or anything that can be cut into them.
        progress: Show a progress bar where there is a terminal.
    """
    network, likelihood = extension.posterior.network, extension.likelihood
    device = network_dtype_device(network)[1]
    found: dict[str, list[Tensor]] = {}
    for x in inputs(data, network, progress=progress, description="rgpr predict"):
        for name, rows in _of_batch(likelihood, promises, say(on_device(x, device))).items():
            found.setdefault(name, []).append(rows.cpu())
    arrays: dict[str, Any] = {name: _array(torch.cat(parts)) for name, parts in found.items()}
    if "low" in arrays:
        arrays["interval"] = arrays.pop("low"), arrays.pop("high")
    return Predictions(**arrays, index=data.index if isinstance(data, Batches) else None)


def _of_batch(likelihood: Likelihood, promises: Promises, said: Said) -> Mapping[str, Tensor]:
    names = [name.replace("covariance", "variance") for name in likelihood.answers]
    found = dict(zip(names, said.answers, strict=True))
    if isinstance(likelihood, LabelLikelihood):
        p = found["probabilities"]
        found["confidence"] = likelihood.confidence(p)
        unknown = p.isnan().any(1)
        label = likelihood.prediction(p)
        found["label"] = torch.where(unknown.reshape(-1, *[1] * (label.dim() - 1)), -1, label)
    found["score"] = said.score
    if promises.references is not None:
        p = found["p_value"] = conformal.p_values(found["score"], promises.references)
        found["flag"] = (p <= promises.alpha) | p.isnan()
    if promises.bound is not None and likelihood.sets:
        found["set"] = class_set(said.ranks, promises.bound)
    elif promises.bound is not None:
        found["low"], found["high"] = interval(said.ranks, promises.bound)
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


# -- sets and intervals --------------------------------------------------------------------------


def ranks(given: Extension, reading: Reading[Gaussian]) -> Ranks:
    """What sets and intervals are made of.

    Args:
        given: The model as the fit or the user left it.
        reading: One pass.

    Returns:
        Of labels their log-probabilities, else the mean and the standard deviations, ``(B, C)``;
        in float64.
    """
    if isinstance(given.likelihood, LabelLikelihood):
        return (log_probabilities(given, reading),)
    return reading.output.mean.double(), deviations(given, reading)


def class_set(ranks: Ranks, bound: Tensor) -> Tensor:
    """The alternatives on the last axis whose conformal score is within the bound, as booleans."""
    [log_probabilities] = ranks
    return conformal.inside(log_probabilities, bound)


def interval(ranks: Ranks, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The targets whose conformal score is within the bound: their ends, ``(B, C)`` each.

    For several labels they are booleans: what is surely there, and what may be.
    """
    if len(ranks) == 1:
        without, there = class_set(ranks, bound).unbind(-1)
        return ~without, there
    mean, deviation = ranks
    limit = deviation.isinf()
    width = torch.where(limit, torch.inf, bound * deviation)  # also where the bound is zero
    low, high = (torch.where(limit, 0.0, mean) + side * width for side in (-1, 1))
    return low, high
