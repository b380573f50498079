r"""Many streams of scores at once: p-values and alarms of a monitor, of CUSUM and of a KS test.

Scores are standard normal, and from a change on normal with mean ``shift``. All arrays have streams
on the first axis and inputs on the last.

- :func:`online` counts for each input the earlier ones that are larger or equal, by merging sorted
  halves; with it p-values of :mod:`rgpr.audit.ranks` come without a loop over inputs.
- :func:`capital` plays :mod:`rgpr.audit.martingale`, with the monitor's own functions.
- :func:`cusum` sums :math:`C_t = \max(0, C_{t-1} + z_t - \tfrac12)` with scores ``z`` that have the
  mean and standard deviation of the validation data taken out: Page's test, best for a shift of
  one.
- :func:`sliding_ks` is the Kolmogorov-Smirnov distance between the last inputs and the validation
  data, as often as a step says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rgpr.audit.martingale import advance, bets, start, waking
from rgpr.audit.ranks import fixed_p_values, places, ranks_of_edges

__all__ = ["capital", "cusum", "first_above", "online", "p_values", "scores", "sliding_ks"]

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

# The inputs of a stream are halved so often; what is left is compared directly.
_LEVELS = 10
# Inputs whose bets are made at a time.
_STEPS = 50


def scores(
    generator: np.random.Generator, shape: tuple[int, int], quiet: int, shift: float
) -> Array:
    """Normal scores whose mean moves by ``shift`` after so many quiet inputs."""
    drawn = generator.standard_normal(shape)
    drawn[:, quiet:] += shift
    return drawn


def online(values: NDArray[Any], ties: bool = True) -> tuple[Integers, Integers]:
    """How many earlier entries of a row are larger than each, and how many are equal.

    Args:
        values: ``(S, T)``.
        ties: Whether equal ones are counted; all are told to be none otherwise.
    """
    x = torch.from_numpy(np.ascontiguousarray(values))
    streams, length = x.shape
    base = -(-length // 2**_LEVELS)
    x = torch.nn.functional.pad(x, (0, base * 2**_LEVELS - length))
    blocks = x.view(streams, -1, base)
    earlier = torch.ones(base, base, dtype=torch.bool).tril(-1)
    there, here = blocks[:, :, None, :], blocks[:, :, :, None]
    larger = ((there > here) & earlier).sum(-1).view_as(x)
    equal = torch.zeros_like(larger)
    if ties:
        equal += ((there == here) & earlier).sum(-1).view_as(x)
    size = base
    while size < x.shape[1]:
        halves = x.view(streams, -1, 2, size)
        left, right = halves[:, :, 0].sort().values, halves[:, :, 1].contiguous()
        up_to = torch.searchsorted(left, right, right=True)
        larger.view(halves.shape)[:, :, 1] += size - up_to
        if ties:
            equal.view(halves.shape)[:, :, 1] += up_to - torch.searchsorted(left, right)
        size *= 2
    return larger[:, :length].numpy(), equal[:, :length].numpy()


def p_values(
    generator: np.random.Generator, references: Array, stream: Array, kind: str, bins: int = 1024
) -> Array:
    """P-values of streams.

    Args:
        generator: Source of random numbers.
        references: Validation scores of each stream, ``(S, m)``.
        stream: ``(S, T)``.
        kind: ``"exact"`` ranks among references and all earlier inputs, ``"binned"`` as the monitor
            does it, or ``"fixed"`` ranks among the references alone.
        bins: The most bins.
    """
    m, random = references.shape[1], generator.random(stream.shape)
    if kind == "exact":
        larger = online(np.concatenate([references, stream], 1), ties=False)[0][:, m:]
        total = m + 1 + np.arange(stream.shape[1])
        found: Array = (larger + 1 - random) / total
        return found
    ordered = np.sort(references, 1)
    ranks = np.arange(1, m + 1) if kind == "fixed" else ranks_of_edges(m, bins)
    edges, no_ties = ordered[:, ranks - 1], np.zeros(len(ranks))
    placed = np.stack([places(s, s, e, no_ties) for s, e in zip(stream, edges, strict=True)])
    if kind == "fixed":
        return fixed_p_values(m - placed, m, random)
    gaps = np.diff(ranks, prepend=0, append=m + 1)
    above = m + 1 - gaps.cumsum()
    larger, equal = online(placed.astype(np.int32))
    total = m + 1 + np.arange(stream.shape[1])
    binned: Array = (above[placed] + larger + (1 - random) * (gaps[placed] + equal)) / total
    return binned


def capital(p: Array) -> Array:
    """The logarithm of the martingale after each input, ``(S, T)``."""
    shares, log = start(len(p)), np.zeros(len(p))
    found = np.empty(p.shape)
    for begin in range(0, p.shape[1], _STEPS):
        densities = bets(np.ascontiguousarray(p[:, begin : begin + _STEPS].T))
        for step in range(densities.shape[1]):
            awake = float(waking(np.int64(begin + step + 1)))  # type: ignore[arg-type]
            shares, grown = advance(shares, densities[:, step], awake)
            log += grown
            found[:, begin + step] = log
    return found


def cusum(references: Array, stream: Array) -> Array:
    """Page's sum after each input, ``(S, T)``."""
    mean, deviation = references.mean(1, keepdims=True), references.std(1, ddof=1, keepdims=True)
    gains = ((stream - mean) / deviation - 0.5).T
    found, now = np.empty(gains.shape), np.zeros(len(stream))
    for step, gain in enumerate(gains):
        now = np.maximum(0, now + gain)
        found[step] = now
    return found.T


def sliding_ks(references: Array, stream: Array, window: int = 100, step: int = 10) -> Array:
    """The distance after every ``step`` inputs from the first full window on, ``(S, E)``."""
    m = references.shape[1]
    ordered = np.sort(references, 1)
    below = np.stack([np.searchsorted(r, s) for r, s in zip(ordered, stream, strict=True)]).astype(
        np.uint16
    )
    views = np.lib.stride_tricks.sliding_window_view(below, window, axis=1)[:, ::step]
    inside = np.sort(views, axis=-1).astype(np.float32) / m
    place = np.arange(1, window + 1, dtype=np.float32) / window
    over, under = (place - inside).max(-1), (inside - place + 1 / window).max(-1)
    found: Array = np.maximum(over, under).astype(np.float64)
    return found


def first_above(path: Array, limit: float) -> Integers:
    """The number of the first entry of each row that reaches the limit, from 1; 0 for none."""
    reached = path >= limit
    found: Integers = np.where(reached.any(1), reached.argmax(1) + 1, 0)
    return found
