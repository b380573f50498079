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
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Reservoir:
    """An even sample of at most ``size`` rows of a stream, the same however the stream is cut.

    Every row has a key made from the bits of its input and from how many equal inputs came before
    it, as good as random; the rows with the smallest keys are kept. So neither the size nor the
    order of batches matters, nor which of several processes saw a row, and of an input that comes
    often as large a share is kept as of all others. (Where copies of an input are spread over
    several processes, each process counts its own.)

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

    def merge(self, state: Any) -> None:
        """Take in what another one kept; see :attr:`state`."""
        seen, rows = state
        if rows:
            self._extend(*rows, seen=seen)

    @property
    def state(self) -> tuple[int, tuple[Tensor, ...]]:
        """How many rows were seen, and the keys and rows that were kept."""
        self._settle()
        return self.seen, self._parts[0] if self._parts else ()

    @property
    def items(self) -> tuple[Tensor, ...]:
        """The rows that were kept, of each tensor, in the order of their keys."""
        return self.state[1][1:]

    def _extend(self, keys: Tensor, *rows: Tensor, seen: int) -> None:
        self.seen += seen
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
        place = torch.arange(len(keys), device=keys.device)
        within = place - torch.searchsorted(ordered, ordered)
        numbers = torch.empty_like(place)
        numbers[order] = within
        for run in self._runs:
            high = torch.searchsorted(run, keys, right=True)
            numbers += high - torch.searchsorted(run, keys)
        if sum(map(len, self._runs)) < _REMEMBERED:
            while self._runs and len(self._runs[-1]) <= 2 * len(ordered):
                ordered = torch.cat([self._runs.pop(), ordered]).sort().values
            self._runs.append(ordered)
        return numbers


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
