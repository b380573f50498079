"""What a monitor is given, checked before anything in it changes."""

from __future__ import annotations

import math
from datetime import datetime
from numbers import Integral, Real
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._network.checks import network_dtype_device
from ...likelihoods import LabelLikelihood
from ...model import RGPR

__all__ = ["check_predictions", "check_settings", "input_numbers", "seconds"]

# The numbers of columns that models return. Predictions are given so that the network need not run
# again, so it runs once for all of them.
_KNOWN: WeakKeyDictionary[RGPR, int | None] = WeakKeyDictionary()
# How far from one a row of probabilities may sum, beside what its dtype rounds.
_OFF = 1e-3


def check_settings(alpha: Any, bins: Any, window: Any) -> None:
    """Refuse settings of a monitor that are out of range or no numbers."""
    if not isinstance(alpha, Real):
        raise TypeError(f"alpha = {alpha!r} is no number; pass a probability such as 0.01")
    if not 0 < float(alpha) < 1:
        raise ValueError(
            f"alpha = {alpha} must lie between 0 and 1: the chance of a false alarm, ever"
        )
    for name, value in (("bins", bins), ("window", window)):
        if not isinstance(value, Integral):
            raise TypeError(f"{name} = {value!r} is no whole number; pass an int such as 1000")
    if bins < 8:
        raise ValueError(f"bins = {bins} is too few to rank scores; use at least 8")
    if window < 1:
        raise ValueError(f"window = {window} must be at least 1: a number of inputs")


def seconds(at: Any) -> float | None:
    """A time as a number; of a ``datetime`` it is its ``timestamp()``."""
    if at is None:
        return None
    if isinstance(at, datetime):
        at = at.timestamp()
    if not isinstance(at, Real) or isinstance(at, np.timedelta64):
        raise TypeError(
            f"at = {at!r} is a {type(at).__name__}; pass one number for the batch, such as "
            "time.time(), or a datetime.datetime"
        )
    if not math.isfinite(at):
        raise ValueError(f"at = {at} is no time; leave it out where the time is not known")
    return float(at)


def input_numbers(numbers: Any, count: int, read: int) -> NDArray[np.int64]:
    """Numbers of so many inputs, each of which was read and is named once."""
    which = np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers)
    if which.shape != (count,):
        raise ValueError(
            f"numbers have shape {which.shape} for {count} predictions; give the "
            "number of each input"
        )
    if count and (which.dtype.kind not in "iuf" or bool((which != np.floor(which)).any())):
        fractions = which.dtype.kind == "f"
        value = which[which != np.floor(which)][0] if fractions else which[0]
        raise ValueError(
            f"{value!r} is no number of an input; inputs are numbered 1, 2, ... in the order they "
            "were read, so give whole numbers"
        )
    outside = which[(which < 1) | (which > read)]
    if len(outside):
        raise ValueError(
            f"there is no input number {outside[0]:g}: {read} inputs were read, and the first "
            "has number 1"
        )
    which = which.astype(np.int64)
    values, times = np.unique(which, return_counts=True)
    if len(values) < count:
        raise ValueError(
            f"input {values[times > 1][0]} is named {times.max()} times; an input has one label, "
            "so name each input once"
        )
    return which


def check_predictions(predicted: Tensor, model: RGPR, *, made: bool) -> None:
    """Refuse what is not what a plain call of the model returns.

    The number of columns is compared with what the model gives for zeros. Of a network that takes
    several tensors nothing is known about the form of its inputs, and any number is taken.

    Args:
        predicted: Probabilities, or means of a regression.
        model: The model.
        made: Whether the model made them just now.
    """
    likelihood = model._likelihood
    kind = "probabilities" if isinstance(likelihood, LabelLikelihood) else "means"
    if not made and model not in _KNOWN:
        _KNOWN[model] = _columns(model)
    classes = None if made else _KNOWN[model]
    if predicted.dim() != 2 or classes not in (None, predicted.shape[1]):
        raise ValueError(
            f"predicted has shape {tuple(predicted.shape)}; expected {kind} "
            f"(B, {'C' if classes is None else classes}), as model(x) returns them"
        )
    numbers = predicted.detach().double()
    bad = ~numbers.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the prediction in row {int(bad.nonzero()[0])} is not finite, so it is neither right "
            f"nor wrong ({int(bad.sum())} such rows); leave these inputs out"
        )
    if kind == "means" or made:
        return
    off = 4 * torch.finfo(predicted.dtype).eps if predicted.is_floating_point() else 0.0
    wrong = ((numbers < -off) | (numbers > 1 + off)).any(1)
    if likelihood.sets:
        wrong |= (numbers.sum(1) - 1).abs() > _OFF + off
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        shown = ", ".join(f"{value:.3g}" for value in numbers[row, :4].tolist())
        more = ", ..." if numbers.shape[1] > 4 else ""
        raise ValueError(
            f"row {row} of predicted holds no probabilities ({shown}{more}); "
            "these look like logits: give what model(x) returns"
        )


@torch.no_grad()
def _columns(model: RGPR) -> int | None:
    """How many columns a plain call of the model returns, where the form of its inputs is known."""
    shape = model._input_shape
    if not isinstance(shape, torch.Size):
        return None
    dtype, device = network_dtype_device(model.posterior.network)
    dtype = dtype if model.input is None else torch.long
    answer = model(torch.zeros(2, *shape, dtype=dtype, device=device))
    return int((answer[0] if isinstance(answer, tuple) else answer).shape[1])
