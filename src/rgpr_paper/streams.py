r"""Many streams of scores at once: p-values and alarms of a monitor, of CUSUM and of a KS test.

Scores are standard normal, and from a change on normal with mean ``shift``. All arrays have streams
on the first axis and inputs on the last.

- :func:`online` counts for each input the earlier ones that are larger, by merging sorted halves;
  :func:`online_bins` counts those in higher bins and in the same one, by sums over blocks of bins.
  With these come the p-values of :mod:`rgpr.audit.monitor.ranks`.
- :func:`capital` plays :mod:`rgpr.audit.monitor.martingale`, with the monitor's own functions.
- :func:`cusum` sums :math:`C_t = \max(0, C_{t-1} + z_t - \tfrac12)` with scores ``z`` that have the
  mean and standard deviation of the validation data taken out: Page's test, best for a shift of
  one.
- :func:`sliding_ks` is the Kolmogorov-Smirnov distance between the last inputs and the validation
  data, as often as a step says.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rgpr.audit.monitor.martingale import advance, bets, start, waking
from rgpr.audit.monitor.ranks import fixed_p_values, ranks_of_edges

__all__ = [
    "capital",
    "cusum",
    "first_above",
    "online",
    "online_bins",
    "p_values",
    "scores",
    "sliding_ks",
]

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

# The inputs of a stream are halved so often; what is left is compared directly.
_LEVELS = 10
# Bins whose entries are counted together.
_BLOCK = 32
# Inputs whose bets are made at a time.
_STEPS = 50


def scores(
    generator: np.random.Generator, shape: tuple[int, int], quiet: int, shift: float
) -> Array:
    """Normal scores whose mean moves by ``shift`` after so many quiet inputs."""
    drawn = generator.standard_normal(shape)
    drawn[:, quiet:] += shift
    return drawn


def online(values: Array) -> Integers:
    """How many earlier entries of a row are larger than each, ``(S, T)``."""
    x = torch.from_numpy(np.ascontiguousarray(values))
    streams, length = x.shape
    base = -(-length // 2**_LEVELS)
    x = torch.nn.functional.pad(x, (0, base * 2**_LEVELS - length))
    blocks = x.view(streams, -1, base)
    earlier = torch.ones(base, base, dtype=torch.bool).tril(-1)
    there, here = blocks[:, :, None, :], blocks[:, :, :, None]
    larger = ((there > here) & earlier).sum(-1).view_as(x)
    size = base
    while size < x.shape[1]:
        halves = x.view(streams, -1, 2, size)
        left, right = halves[:, :, 0].sort().values, halves[:, :, 1].contiguous()
        up_to = torch.searchsorted(left, right, right=True)
        larger.view(halves.shape)[:, :, 1] += size - up_to
        size *= 2
    found: Integers = larger[:, :length].numpy()
    return found


def online_bins(placed: Integers, bins: int) -> tuple[Integers, Integers]:
    """How many earlier entries of a row lie in higher bins than each, and how many in the same.

    Args:
        placed: Numbers of bins, ``(S, T)``.
        bins: How many there are.
    """
    rows, blocks = np.arange(len(placed)), -(-bins // _BLOCK)
    # Entries in higher blocks, and in higher bins of the same block, than each.
    above = np.zeros((len(rows), blocks), np.int32)
    inside = np.zeros((len(rows), blocks, _BLOCK), np.int32)
    same = np.zeros((len(rows), blocks * _BLOCK), np.int32)
    every_block, every_bin = np.arange(blocks), np.arange(_BLOCK)
    larger = np.empty(placed.shape[::-1], np.int64)
    equal = np.empty(placed.shape[::-1], np.int64)
    for step, now in enumerate(np.ascontiguousarray(placed.T)):
        block, place = now // _BLOCK, now % _BLOCK
        row = inside[rows, block]
        larger[step] = above[rows, block] + row[rows, place]
        equal[step] = same[rows, now]
        above += every_block < block[:, None]
        row += every_bin < place[:, None]
        inside[rows, block] = row
        same[rows, now] += 1
    return larger.T, equal.T


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
    total = m + 1 + np.arange(stream.shape[1])
    if kind == "exact":
        larger = online(np.concatenate([references, stream], 1))[:, m:]
        exact: Array = (larger + 1 - random) / total
        return exact
    ranks = np.arange(1, m + 1) if kind == "fixed" else ranks_of_edges(m, bins)
    edges = np.sort(references, 1)[:, ranks - 1]
    placed = np.stack([np.searchsorted(e, s) for s, e in zip(stream, edges, strict=True)])
    if kind == "fixed":
        return fixed_p_values(m - placed, m, random)
    gaps = np.diff(ranks, prepend=0, append=m + 1)
    above = m + 1 - gaps.cumsum()
    larger, equal = online_bins(placed, len(gaps))
    binned: Array = (above[placed] + larger + (1 - random) * (gaps[placed] + equal)) / total
    return binned


def capital(p: Array) -> Array:
    """The logarithm of the martingale after each input, ``(S, T)``."""
    shares, log = start(len(p)), np.zeros(len(p))
    found = np.empty(p.shape)
    awake = waking(np.arange(1, p.shape[1] + 1))
    for begin in range(0, p.shape[1], _STEPS):
        densities = bets(np.ascontiguousarray(p[:, begin : begin + _STEPS].T))
        for step in range(densities.shape[1]):
            shares, grown = advance(shares, densities[:, step], float(awake[begin + step]))
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
    m = np.float32(references.shape[1])
    place = np.arange(1, window + 1, dtype=np.float32) / np.float32(window)
    found = np.empty((len(stream), (stream.shape[1] - window) // step + 1))
    for row, (ordered, inputs) in enumerate(zip(np.sort(references, 1), stream, strict=True)):
        below = np.searchsorted(ordered, inputs).astype(np.uint16)
        views = np.lib.stride_tricks.sliding_window_view(below, window)[::step]
        gap = place - np.sort(views, axis=-1).astype(np.float32) / m
        found[row] = np.maximum(gap.max(-1), 1 / window - gap.min(-1))
    return found


def first_above(path: Array, limit: float) -> Integers:
    """The number of the first entry of each row that reaches the limit, from 1; 0 for none."""
    reached = path >= limit
    found: Integers = np.where(reached.any(1), reached.argmax(1) + 1, 0)
    return found
