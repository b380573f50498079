"""Answers for data of any size: a batch through the network at a time, a chunk kept at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..._progress import bar
from ..inputs.data import Data
from .joining import Joined, join
from .parts import Parts

__all__ = ["Stream", "Written"]

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Written:
    """What a run did.

    Attributes:
        joined: What the file holds.
        taken_up: How many rows of the data an earlier run had finished.
        skipped: Images that could not be read, with the reason.
    """

    joined: Joined
    taken_up: int
    skipped: list[str]


@dataclass(frozen=True)
class Stream:
    """What makes answers of data.

    Attributes:
        data: The data.
        of: Gives the arrays of a batch of inputs.
        chunk: Rows of a part, rounded up to whole batches.
        progress: Show a progress bar where there is a terminal.
        description: Label of the progress bar.
    """

    data: Data
    of: Callable[[Tensor], Arrays]
    chunk: int
    progress: bool = True
    description: str = "rgpr predict"

    def into(self, parts: Parts) -> Written:
        """Write the answers of all rows, behind those that are there already."""
        size = self.data.reading.batch_size
        per_chunk = max(1, -(-self.chunk // size))
        with parts.held():
            start = min(parts.done * per_chunk * size, len(self.data))
            self._write(parts, start, per_chunk)
            with parts.finishing() as path:
                joined = join(parts, path)
        return Written(joined, start, parts.skipped)

    def _write(self, parts: Parts, start: int, per_chunk: int) -> None:
        total = len(self.data)
        if start >= total > 0:
            return
        held: list[Arrays] = []
        skipped: list[str] = []
        count = 0
        with bar(
            None, self.description, self.progress, total=total, initial=start, unit="rows"
        ) as shown:
            for piece in self.data.pieces(start):
                if len(piece.x):
                    arrays = self.of(piece.x)
                    if piece.names is not None:
                        arrays = {"path": np.array(piece.names), **arrays}
                    held.append(arrays)
                skipped += piece.skipped
                count += 1
                shown.update(len(piece.x) + len(piece.skipped))
                if count == per_chunk:
                    parts.add(_together(held), skipped)
                    held, skipped, count = [], [], 0
            if count:
                parts.add(_together(held), skipped)


def _together(batches: list[Arrays]) -> Arrays:
    if not batches:
        return {}
    return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
