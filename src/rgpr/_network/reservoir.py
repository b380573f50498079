"""An even sample of a stream, which does not depend on how the stream was cut."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch, first_part
from .kept import cat

__all__ = ["Reservoir", "row_keys"]


# On a GPU, where sorting is mostly waiting, so many times the rows are gathered before it.
_LAZY = 4
# Keys of rows that are remembered to count equal ones: 128 MiB of them.
_REMEMBERED = 1 << 24
# Words of a row that have a factor of their own each in its key.
_KEYED = 128
_ODD = 0x5851F42D4C957F2D
# The inverse of _ODD among numbers of 64 bits with a sign, all of which are below _HIGHEST.
_HIGHEST = 1 << 63
_INVERSE = (pow(_ODD, -1, 1 << 64) ^ _HIGHEST) - _HIGHEST
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Reservoir:
    """An even sample of at most ``size`` rows of a stream, the same however the stream is cut.

    Every row has a key made from the bits of its input and from how many equal inputs came before
    it, as good as random; the rows with the smallest keys are kept. So neither the size nor the
    order of batches matters, nor which of several processes saw a row, and of an input that comes
    often as large a share is kept as of all others. Where copies of an input are spread over
    several processes, each process counts its own. Merged with its history, another's sample is
    counted on from here: if the other kept all that it saw, the sample is that of one process.

    Args:
        size: The most rows that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self._parts: list[tuple[Tensor, ...]] = []
        self._waiting = 0
        self._occurrences = _Occurrences()

    def add(self, x: Batch, *rows: Tensor) -> None:
        """Take in a batch: inputs ``(B, ...)``, and what is kept of each (a tensor by default)."""
        keys = row_keys(x)
        # The first of equal inputs has the key of its bits; each further one has a key of its own.
        keys = keys + _mixed(self._occurrences.numbered(keys)) * _ODD
        self._extend(keys, *(rows or (first_part(x),)), seen=len(keys))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another one kept; see :attr:`state`."""
        if state["rows"]:
            keys, *rows = state["rows"]
            if "history" in state:
                keys = self._counted_on(keys, state)
            self._extend(keys, *rows, seen=state["seen"])
        if "history" in state:
            self._occurrences.remember(state["history"])

    @property
    def state(self) -> dict[str, Any]:
        """How many rows are kept at most and how many were seen, and the keys and rows kept."""
        self._settle()
        rows = list(self._parts[0]) if self._parts else []
        return {"size": self.size, "seen": self.seen, "rows": rows}

    @property
    def state_and_history(self) -> dict[str, Any]:
        """The same, and the keys of all rows that were added: copies of them may come yet."""
        return {**self.state, "history": self._occurrences.every}

    @property
    def items(self) -> tuple[Tensor, ...]:
        """The rows that were kept, of each tensor, in the order of their keys."""
        return tuple(self.state["rows"][1:])

    def _counted_on(self, keys: Tensor, state: Mapping[str, Any]) -> Tensor:
        """The keys of another's sample, with those of copies of rows seen here numbered anew.

        Under the same key, copies in several shards would all be kept or none.
        """
        first = state["history"].to(keys.device)
        if len(first) == 0:
            return keys
        number = _within(first)
        every, order = (first + _mixed(number) * _ODD).sort()
        place = order[torch.searchsorted(every, keys).clamp_max(len(every) - 1)]
        first, number = first[place], number[place]
        before = self._occurrences.count(first)
        copies = (first + _mixed(number) * _ODD == keys) & (before > 0)
        anew = first + _mixed(number + before) * _ODD
        if state["seen"] > len(keys):
            # Rows with larger keys are gone, so new keys are drawn below the largest that is left.
            bound = _mixed(keys).max()
            share = (_mixed(anew + bound) >> 11).double() / (1 << 53) + 0.5
            anew = _unmixed((share * (bound.double() + _HIGHEST) - _HIGHEST).long())
        return torch.where(copies, anew, keys)

    def _extend(self, keys: Tensor, *rows: Tensor, seen: int) -> None:
        self.seen += seen
        if self._parts:  # what was loaded from a file may be elsewhere
            device = self._parts[0][0].device
            keys, rows = keys.to(device), tuple(t.to(device) for t in rows)
        full = bool(self._parts) and len(self._parts[0][0]) == self.size
        if full and not keys.is_cuda:  # where to ask how many are left would mean to wait
            # Once it is full, few rows of a batch get in.
            chosen = _mixed(keys) < _mixed(self._parts[0][0][-1])
            keys, rows = keys[chosen], tuple(t[chosen] for t in rows)
        if len(keys):
            self._parts.append((keys, *(t.clone() for t in rows)))
            self._waiting += len(keys)
        if self._waiting >= self.size * (_LAZY if keys.is_cuda else 1):
            self._settle()

    def _settle(self) -> None:
        if self._waiting:
            # Sequences of differing lengths are filled up.
            merged = [
                torch.cat(column) if len({t.shape[1:] for t in column}) == 1 else cat(column)
                for column in zip(*self._parts, strict=True)
            ]
            kept = _mixed(merged[0]).argsort(stable=True)[: self.size]
            self._parts, self._waiting = [tuple(t[kept] for t in merged)], 0


class _Occurrences:
    """How often each key came before.

    All keys are remembered, in sorted runs whose lengths at least double from each to the one
    before it, so that a batch is looked up in few of them and none is sorted often.
    """

    def __init__(self) -> None:
        self._runs: list[Tensor] = []

    def numbered(self, keys: Tensor) -> Tensor:
        """How many equal keys came before each of these, ``(B,)``; then they count as seen."""
        order = keys.argsort(stable=True)
        ordered = keys[order]
        numbers = torch.empty_like(keys)
        numbers[order] = _within(ordered)
        numbers += self.count(keys)
        self.remember(ordered)
        return numbers

    def count(self, keys: Tensor) -> Tensor:
        """How many equal keys were remembered for each of these, ``(B,)``."""
        numbers = torch.zeros_like(keys)
        self._runs = [run.to(keys.device) for run in self._runs]
        for run in self._runs:
            high = torch.searchsorted(run, keys, right=True)
            numbers += high - torch.searchsorted(run, keys)
        return numbers

    def remember(self, ordered: Tensor) -> None:
        """Count keys, in ascending order, as seen."""
        if len(ordered) and sum(map(len, self._runs)) < _REMEMBERED:
            ordered = ordered.to(self._runs[0].device) if self._runs else ordered
            while self._runs and len(self._runs[-1]) <= 2 * len(ordered):
                ordered = torch.cat([self._runs.pop(), ordered]).sort().values
            self._runs.append(ordered)

    @property
    def every(self) -> Tensor:
        """The keys that were remembered, in ascending order."""
        return torch.cat(self._runs).sort().values if self._runs else torch.zeros(0).long()


def _within(ordered: Tensor) -> Tensor:
    """How many equal keys stand before each of these, which are in ascending order."""
    place = torch.arange(len(ordered), device=ordered.device)
    return place - torch.searchsorted(ordered, ordered)


def row_keys(x: Batch) -> Tensor:
    """A number for each row that depends on its bits alone; :func:`_mixed` makes it random."""
    if not isinstance(x, Tensor):
        parts = x.values() if isinstance(x, Mapping) else x
        keys = torch.stack([row_keys(part) for part in parts], 1)
        return (keys * _factors(keys.shape[1], keys.device)).sum(1)
    x = x if x.dim() > 1 else x[:, None]
    words = _words(x.detach().flatten(1))
    if words.shape[1] > _KEYED:
        # Sums along both sides of a table tell where a word was: adding is fast.
        missing = -words.shape[1] % _KEYED
        padded = nn.functional.pad(words, (0, missing)) if missing else words
        table = padded.view(len(padded), padded.shape[1] // _KEYED, _KEYED)
        words = torch.cat([table.sum(1), table.sum(2)], 1)
    # Round numbers end in zeros, and so do their products: higher bits are mixed into lower ones.
    words = words ^ (words >> 29)
    return (words * _factors(words.shape[1], words.device)).sum(1)


def _mixed(keys: Tensor) -> Tensor:
    """As good as random: a product mixes all bits into the leading ones, so once more."""
    return (keys ^ ((keys >> 32) & 0xFFFFFFFF)) * _ODD


def _unmixed(mixed: Tensor) -> Tensor:
    """The keys of which :func:`_mixed` makes these numbers."""
    keys = mixed * _INVERSE
    return keys ^ ((keys >> 32) & 0xFFFFFFFF)


def _words(flat: Tensor) -> Tensor:
    """The bits of rows ``(B, N)`` as numbers of 64 bits, several entries in each where it fits."""
    size = flat.element_size()
    if size * flat.shape[1] % 8:
        return flat.contiguous().view(_INTEGERS[size]).long()
    # In one line: a single row may have any stride and count as contiguous.
    line = flat.contiguous().view(-1)
    line = line.clone() if line.storage_offset() * size % 8 else line
    return line.view(torch.int64).view(len(flat), size * flat.shape[1] // 8)


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    """Random odd numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
    return (factors * 2 + 1).to(device)
