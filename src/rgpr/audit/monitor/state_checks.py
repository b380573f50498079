"""What the state of a monitor must be: a file is held to what a stream of inputs could have made.

A checksum finds what happened to a file by accident. These rules find what another program wrote: a
limit that no capital reaches, for one, would make a monitor that never raises an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...saving.checks import ASCENDING, FINITE, NOT_NEGATIVE, POSITIVE, Rule, check_numbers
from .checks import check_settings
from .martingale import BETS
from .performance import WINDOWS
from .trace import POINTS

__all__ = ["check_state", "is_count"]

# More inputs than any stream has, and few enough for exact sums in float64.
_MOST = 2**53
_NUMBERS: Rule = ("numbers", lambda t: ~t.isnan())
_SHARES: Rule = ("between 0 and 1", lambda t: (t >= 0) & (t <= 1))
_COUNTS: Rule = ("whole and not negative", lambda t: (t >= 0) & (t <= _MOST))
_NUMBERED: Rule = ("whole and positive", lambda t: (t >= 1) & (t <= _MOST))
_ANY: Rule = ("", lambda t: torch.ones_like(t, dtype=torch.bool))
_WHOLE = {"counts", "count", "begun", "when", "since", "labelled"}


def is_count(value: Any) -> bool:
    """Whether a value of JSON is a number of inputs."""
    return type(value) is int and 0 <= value <= _MOST


def check_state(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Refuse a state of a wrong shape, and numbers that no stream of inputs makes.

    Raises:
        KeyError: Something is missing.
        TypeError: Something is of another type.
        ValueError: The message names the tensor or the setting.
    """
    layers = about["layers"]
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise ValueError(f"'layers' is {layers!r}; it must be a list of names")
    check_settings(about["alpha"], 8, about["window"])
    for name in ("nans", "stride", "window"):
        least = 0 if name == "nans" else 1
        if not is_count(about[name]) or about[name] < least:
            raise ValueError(f"'{name}' is {about[name]!r}; it must be a whole number from {least}")
    streams = 1 + len(layers)
    for name, (sizes, rule) in _expected(tensors, streams).items():
        tensor = tensors[name]
        dtype = torch.int64 if name.rpartition(".")[2] in _WHOLE else torch.float64
        if tensor.dtype != dtype:
            raise ValueError(f"'{name}' holds {tensor.dtype}, and must hold {dtype}")
        check_numbers(name, tensor, sizes, rule)
    _check_limits(tensors["martingale.limits"], about["alpha"])
    off = (tensors["martingale.shares"].sum(0) - 1).abs()
    check_numbers("martingale.shares", off, (streams,), ("shares of one", lambda t: t < 1e-6))
    if len(tensors["trace"]) > POINTS or len(tensors["performance"]) > WINDOWS:
        raise ValueError("it holds more points or windows than a monitor keeps")


def _expected(
    tensors: Mapping[str, Tensor], streams: int
) -> dict[str, tuple[tuple[int, ...], Rule]]:
    """The shape that each tensor must have beside the others, and the rule for its numbers."""
    bets = len(BETS)
    found: dict[str, tuple[tuple[int, ...], Rule]] = {
        "martingale.limits": ((streams,), POSITIVE),
        "martingale.log": ((streams,), FINITE),
        "martingale.peak": ((streams,), NOT_NEGATIVE),
        "martingale.shares": ((1 + bets, streams), _SHARES),
        "martingale.count": ((streams,), _COUNTS),
        "martingale.gains": ((bets, streams), FINITE),
        "martingale.begun": ((bets, streams), _NUMBERED),
        "martingale.when": ((streams,), _COUNTS),
        "martingale.since": ((streams,), _COUNTS),
        # The time of a point is NaN where it is not known.
        "trace": ((*tensors["trace"].shape[:1], 2 + streams), _ANY),
        "performance": ((*tensors["performance"].shape[:1], 3), NOT_NEGATIVE),
    }
    if "labelled" in tensors:
        found["labelled"] = ((*tensors["labelled"].shape[:1], 2), _NUMBERED)
    for number in range(streams):
        name = f"bins.{number}"
        bins = tensors[f"{name}.edges"].shape[:1]
        found[f"{name}.edges"] = (bins, ASCENDING)
        found[f"{name}.ties"] = (bins, _SHARES)
        found[f"{name}.counts"] = ((bins.numel() + 1,), _NUMBERED)
    return found


def _check_limits(limits: Tensor, alpha: float) -> None:
    """Refuse limits other than those of the level, which is what keeps the promise."""
    expected = torch.full_like(limits, math.log(max(1, len(limits) - 1) / alpha))
    expected[0] = math.log(1 / alpha)
    if not torch.allclose(limits, expected, rtol=1e-9, atol=0.0):
        raise ValueError(f"'martingale.limits' are not those of alpha = {alpha}")
