"""What a report says about a model beside its evaluation: made outliers, levels and timings."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import noise
from .._network.batches import Batch, run
from ..answers.conformal import references_for
from ..model import RGPR
from .evaluate import share
from .passes import Answers, Subject

__all__ = ["Threshold", "first_finite", "made_outliers", "missing_levels", "thresholds", "timings"]

_LEVELS = (0.01, 0.05, 0.1, 0.2)
_MADE = 1000


@dataclass(frozen=True)
class Threshold:
    """What happens at one level.

    Attributes:
        alpha: The level.
        score: Inputs with a score above this are held back.
        shares: By set, the share of inputs that is.
    """

    alpha: float
    score: float
    shares: dict[str, float]


def first_finite(batches: Iterable[Any]) -> Any:
    """The first batch, less its rows with a NaN or an infinity; several tensors stay as they are.

    Raises:
        ValueError: There is no other row.
    """
    for x in batches:
        if not isinstance(x, Tensor):
            return x
        rows = x[x.reshape(len(x), x[:1].numel()).isfinite().all(1)]
        if len(rows):
            return rows
    raise ValueError(
        "the test data hold no input whose entries are all finite, and a report is about some; "
        "give others"
    )


def made_outliers(x: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Outliers that can be made of any inputs, each with a sentence that says what it is.

    The entries of an input with several axes, such as pixels, are alike: they change places within
    the input. Those of a vector are columns with units of their own, and stay in their column.

    Args:
        x: Inputs ``(B, ...)``.
    """
    generator = torch.Generator().manual_seed(0)
    x = x[:_MADE].cpu()
    made = {}
    if x.dim() == 2:
        low, high = x.amin(0), x.amax(0)
        if len(x) > 1:
            made["shuffled"] = (
                "The values of each column are dealt out to the rows anew: every value is usual, "
                "and their combination is not.",
                noise.permuted(x, scale=(1.0, 1.0), generator=generator),
            )
        within = "Every value is random, between the least and the largest one of its column."
    else:
        flat = x.flatten(1)
        order = torch.rand(flat.shape, generator=generator).argsort(1)
        low, high = x.amin(), x.amax()
        made["shuffled"] = (
            "The values of each test input, such as pixels, are in another order.",
            flat.gather(1, order).reshape(x.shape),
        )
        within = "Every value is random, between the least and the largest one of the test data."
    made["uniform"] = (within, noise.uniform(x, low=low, high=high, generator=generator))
    if x.dim() == 4 and min(x.shape[2:]) > 7:
        made["smoothed"] = (
            "The pixels of each test image are in another order, blurred to blobs and given a new "
            "contrast.",
            noise.smoothed(x, low=low, high=high, generator=generator),
        )
    return made


def thresholds(subject: Subject, sets: Mapping[str, Answers]) -> list[Threshold]:
    """What would be held back at usual levels, by set."""
    references, rows = subject.references, []
    if references is None:
        return []
    for alpha in _LEVELS:
        # An input is held back if at most so many references are at least as strange.
        allowed = math.floor(alpha * (len(references) + 1)) - 1
        if allowed >= 0:
            score = float(references[max(0, len(references) - 1 - allowed)])
            shares = {name: share(each.p_value, alpha) for name, each in sets.items()}
            rows.append(Threshold(alpha, score, shares))
    return rows


def missing_levels(subject: Subject) -> str:
    """Why usual levels are missing; nothing if none is."""
    if subject.references is None:
        return ""
    count = len(subject.references)
    few = [(alpha, references_for(alpha)) for alpha in _LEVELS if references_for(alpha) > count]
    needed = [f"{100 * alpha:g} % takes at least {least}" for alpha, least in few]
    if not needed:
        return ""
    return f"A level of {', of '.join(needed)} validation inputs, and there are {count}."


def timings(model: RGPR, x: Batch) -> dict[str, float]:
    """Seconds for a batch: the bare network, and the model; the median of five runs."""
    network = model.posterior.network

    def seconds(function: Any) -> float:
        times = []
        with torch.no_grad():
            function()
            for _ in range(5):
                started = time.perf_counter()
                function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        return sorted(times)[2]

    return {
        "bare network": seconds(lambda: run(network, x)),
        "with RGPR": seconds(lambda: model(x)),
    }
