r"""P-values that stay independent: each input is ranked among the references and earlier inputs.

Let ``m`` references and the inputs be exchangeable, and the references' scores sorted. They leave
``m + 1`` gaps. The first input falls into each gap with the same probability. It then is one more
score among which the second is ranked, so if :math:`c_j` earlier inputs lie in gap ``j``, the next
falls into it with probability :math:`(1 + c_j) / (m + t)` for input ``t`` (Pólya's urn), whatever
else is known about the past. A bin is a run of neighbouring gaps, and :math:`w_j` is the number of
its gaps plus the number of earlier inputs in it. With one uniform number :math:`U` for each input,

.. math:: p_t = \frac{\sum_{k > j} w_k + U_t\, w_j}{m + t}

lies in an interval as long as the probability of its bin, evenly spread over it, and the intervals
fill [0, 1]. So given all that came before, :math:`p_t` is uniform: exactly, for every ``m``, every
number of bins and every ``t``. Hence p-values are independent of each other.

This is the smoothed conformal p-value with ties inside a bin broken at random. Edges of the bins
are scores of references, at ranks that depend on ``m`` alone. That they come from the references
does no harm, because a bin begins with the number of its *gaps*, which is one more than the number
of references strictly between its edges. If a bin began with the references between edges that were
chosen from these same references, p-values would be a little off, and over a long stream this would
add up.

Equal scores are told apart by a second, random number that every reference and every input gets,
and comparing pairs. Then there are no ties, and the above holds for scores with ties too.

Memory: an edge, its random number and a count for each bin, however long the stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bins", "fixed_p_values", "places", "ranks_of_edges"]

# Inputs that are compared with each other at a time.
_CHUNK = 128

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def ranks_of_edges(references: int, bins: int) -> Integers:
    """Which of the sorted references are edges, counted from 1; it depends on their number alone.

    All of them if they are few. Else half of the edges are spread evenly, and half lie ever denser
    towards the largest scores, where strange inputs are told from very strange ones.
    """
    if references < bins:
        return np.arange(1, references + 1)
    even = np.linspace(1, references, bins // 2)
    dense = references + 1 - np.geomspace(1, references, bins - 1 - bins // 2)
    ranks: Integers = np.unique(np.concatenate([even, dense]).round().astype(np.int64))
    return ranks


def places(scores: Array, ties: Array, edges: Array, edge_ties: Array) -> Integers:
    """How many edges lie below each score, ``(T,)``; random numbers decide between equal ones.

    Args:
        scores: ``(T,)``.
        ties: Random numbers of the scores, ``(T,)``.
        edges: In ascending order.
        edge_ties: Random numbers of the edges, ascending among equal edges.
    """
    low, high = (np.searchsorted(edges, scores, side) for side in ("left", "right"))
    for row in np.flatnonzero(low < high):
        low[row] += np.searchsorted(edge_ties[low[row] : high[row]], ties[row])
    return low.astype(np.int64)


class Bins:
    """The references and all earlier inputs, counted in bins.

    Args:
        edges: Scores between bins, ``(K,)`` in ascending order.
        ties: Random numbers that order equal edges, ``(K,)``.
        counts: Gaps and inputs of each bin, ``(K + 1,)``.
    """

    def __init__(self, edges: Array, ties: Array, counts: Integers) -> None:
        self.edges, self.ties, self.counts = edges, ties, counts

    @classmethod
    def of(cls, references: Array, bins: int, generator: np.random.Generator) -> Bins:
        """Bins before the first input.

        Args:
            references: Their scores in any order, ``(m,)``.
            bins: The most bins there may be.
            generator: Source of the random numbers that order equal scores.
        """
        ties = generator.random(len(references))
        order = np.lexsort((ties, references))
        ranks = ranks_of_edges(len(references), bins)
        chosen = order[ranks - 1]
        counts = np.diff(ranks, prepend=0, append=len(references) + 1)
        return cls(references[chosen], ties[chosen], counts.astype(np.int64))

    def p_values(self, scores: Array, random: Array) -> Array:
        """P-values ``(T,)`` of inputs in their order, which then count as earlier ones.

        Args:
            scores: ``(T,)``; a NaN is as strange as can be.
            random: Two uniform numbers for each, ``(T, 2)``: for ties between scores, and within
                bins.
        """
        scores = np.where(np.isnan(scores), np.inf, scores)
        found = np.empty(len(scores))
        for begin in range(0, len(scores), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            found[rows] = self._chunk(scores[rows], random[rows])
        return found

    def _chunk(self, scores: Array, random: Array) -> Array:
        bins = places(scores, random[:, 0], self.edges, self.ties)
        up_to = self.counts.cumsum()
        earlier = np.tri(len(bins), k=-1, dtype=bool)
        higher = ((bins[None, :] > bins[:, None]) & earlier).sum(1)
        equal = ((bins[None, :] == bins[:, None]) & earlier).sum(1)
        above = up_to[-1] - up_to[bins] + higher
        total = up_to[-1] + np.arange(len(bins))
        p: Array = (above + (1 - random[:, 1]) * (self.counts[bins] + equal)) / total
        np.add.at(self.counts, bins, 1)
        return p


def fixed_p_values(above: Integers, references: int, random: Array) -> Array:
    """P-values against the references alone; **not independent of each other**, for comparisons.

    All share the same references. Where these happen to lie a little low, all p-values of a stream
    are a little small, and a player who bets on that wins without end.

    Args:
        above: How many references are larger than each input, of any shape.
        references: How many there are.
        random: Uniform numbers of the same shape.
    """
    found: Array = (above + (1 - random)) / (references + 1)
    return found
