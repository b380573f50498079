"""Learning the coordinates of one representation from one pass over the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._network.moments import ClassMoments, Moments
from .._network.reservoir import Reservoir
from .coordinates import Coordinates, Standardizer, reduce
from .leave_one_out import LeaveOneOut, MomentsWithout, PrototypesWithout
from .prototypes import Prototypes
from .recipes import Strategy

__all__ = ["Collector"]


# Bytes of rows that are kept to find a quantile of the coordinates.
_KEPT = 1 << 26
# Bytes of reduced batches that wait to be taken in together.
_TOGETHER = 1 << 22
# A covariance is formed of so many units at most; of more, the variances alone.
_WIDEST = 4096


class Collector:
    """One representation's statistics, from one pass.

    Args:
        strategy: What they are for.
        r: Factor on the spread.
        hidden: Whether the representation is a hidden layer, and not the input.
    """

    def __init__(self, strategy: Strategy, r: float = 1.0, *, hidden: bool = False) -> None:
        self.strategy, self.r = strategy, r
        self.needs_classes = strategy.coordinates == "prototypes"
        self.moments = Moments(hidden=hidden) if strategy.coordinates == "moments" else None
        self.classes: ClassMoments | None = None
        self.rows: Reservoir | None = None
        self.dtype = torch.float32
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    def take(self, h: Tensor) -> Tensor:
        """Take in a representation unless its classes are needed, and give it as vectors.

        Moments are read there and then, so a raw representation is not copied for them.
        """
        raw = self.moments is not None and self.strategy.of == "raw"
        rows = h if raw else self.rows_of(h)
        if not self.needs_classes:
            self.update(rows)
        return rows

    def rows_of(self, h: Tensor) -> Tensor:
        """The representation as vectors, in memory of their own: the next layer may overwrite h."""
        of = self.strategy.of
        if of == "raw" or (of == "pooled" and h.dim() == 2):
            return h.flatten(1).clone()
        return reduce(h, of)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another collector saw; see :meth:`state`."""
        self._settle()
        self.dtype = getattr(torch, state["dtype"])
        if self.moments is not None:
            self.moments.merge(state["moments"])
        if state["classes"] is not None:
            if self.classes is None:
                self.classes = ClassMoments(state["count"], diagonal=state["diagonal"])
            self.classes.merge(state["classes"])
        if state["rows"] is not None:
            if self.rows is None:
                self.rows = Reservoir(state["rows"]["size"])
            self.rows.merge(state["rows"])

    def state(self, history: bool = False) -> dict[str, Any]:
        """All there is to know of the data seen.

        Args:
            history: Include the keys of all rows seen, so that copies among later rows are
                recognised.
        """
        self._settle()
        moments, classes, rows = self.moments, self.classes, self.rows
        kept = None if rows is None else rows.state_and_history if history else rows.state
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "moments": None if moments is None else moments.state,
            "classes": None if classes is None else classes.state,
            "count": None if classes is None else classes.classes,
            "diagonal": None if classes is None else classes.diagonal,
            "rows": kept,
        }

    def update(self, h: Tensor, y: Tensor | None = None, classes: int = 1) -> None:
        """Take in a batch of vectors, with the class of each row."""
        self.dtype = h.dtype
        exact = self.strategy.offset == 1 and self.moments is not None
        if self.moments is not None:
            self.moments.update(h, extremes=exact)
        else:
            if self.classes is None:
                count, wide = classes if self.needs_classes else 1, h.shape[1] > _WIDEST
                self.classes = ClassMoments(count, diagonal=wide)
            if y is None or not self.needs_classes:
                y = torch.zeros(len(h), dtype=torch.long, device=h.device)
            self._waiting.append((h, y.clone()))  # a loader may use its tensor again
            self._bytes += h.nbytes
            # Many small batches are taken in as one: on a GPU each would be mostly waiting.
            if self._bytes > _TOGETHER:
                self._settle()
        if self.strategy.offset is not None and not exact:
            if self.rows is None:
                size = h[:1].numel() * h.element_size()
                self.rows = Reservoir(max(16, min(10_000, _KEPT // max(1, size))))
            # Rows of representations: the sample of shards is as even, not the same.
            self.rows.add(h)

    @property
    def total(self) -> Tensor:
        """A number that is not finite if anything that came in was not."""
        if self.moments is not None:
            return self.moments.total
        assert self.classes is not None
        self._settle()  # a finite value may still have a square that is not
        return self.classes.total

    def _settle(self) -> None:
        if self._waiting and self.classes is not None:
            parts = self._waiting
            h, y = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            self.classes.update(h, y)
            self._waiting, self._bytes = [], 0

    def without_each(self) -> LeaveOneOut:
        """What measures training rows by the statistics of all others."""
        self._settle()
        if self.moments is not None:
            return MomentsWithout(self.moments, self.r)
        assert self.classes is not None
        return PrototypesWithout(self.classes, self.strategy.shrinkage, self.r)

    def finish(self) -> Coordinates:
        """The map, with its offsets."""
        strategy, r, dtype = self.strategy, self.r, self.dtype
        self._settle()
        coordinates: Coordinates
        if self.moments is not None:
            moments = self.moments
            coordinates = Standardizer(moments.mean, moments.std, r=r, dtype=dtype, of=strategy.of)
            if strategy.offset == 1:
                # By the very operations that a prediction does: not even rounding is left.
                ends = torch.stack([moments.low, moments.high]).to(coordinates.mean.dtype)
                coordinates.offset = ((ends - coordinates.mean) / coordinates.scale).abs().amax(0)
        else:
            assert self.classes is not None
            coordinates = Prototypes(
                self.classes.means,
                self.classes.covariance,
                seen=self.classes.counts > 0,
                shrinkage=strategy.shrinkage,
                r=r,
                dtype=dtype,
                of=strategy.of,
            )
        if self.rows is not None and strategy.offset is not None:
            # Rows are reduced already.
            of, coordinates.of = coordinates.of, "raw"
            distances = coordinates(*self.rows.items).abs().sort(0).values
            coordinates.of = of
            index = min(len(distances) - 1, int(strategy.offset * len(distances)))
            coordinates.offset = distances[index].clone()
        return coordinates
