r"""The ReLU-GP residual: representations in, variance out.

.. math:: v(x) = \sum_{l=0}^{L-1} \sigma_l^2\, u_l(x), \qquad
          u_l(x) = k(\psi_l(h_l), \psi_l(h_l); 1)

with one DSCS kernel per representation, in the coordinates of :mod:`rgpr.coordinates` (the
paper's: standardised units); ``l = 0`` is the input and carries the theorem. ``v`` is linear in
:math:`\sigma^2`, so ``u`` is all that tuning ever needs of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from .coordinates import Coordinates, Prototypes
from .data import check_rows
from .fused import in_graph, takes_packed
from .hooks import evaluating, full_precision
from .packed import Packed, Parts
from .posteriors import Posterior
from .representations import capture
from .standardize import StableBuffers

__all__ = ["Residual"]

T = TypeVar("T")


class Residual(StableBuffers):
    """A kernel for each representation, and their scales ``sigma2``.

    Args:
        coordinates: One map per representation, the input's first.
        sigma2: ``(L,)``; zeros by default, which switches the residual off.
    """

    coordinates: nn.ModuleList
    sigma2: Tensor
    _packed: Packed | None = None

    def __init__(self, coordinates: Sequence[Coordinates], sigma2: Tensor | None = None) -> None:
        super().__init__()
        self.coordinates = nn.ModuleList(coordinates)
        device = next(coordinates[0].buffers()).device
        zeros = torch.zeros(len(coordinates), dtype=torch.float64, device=device)
        self.register_buffer("sigma2", zeros if sigma2 is None else sigma2.to(zeros))

    def at(self, index: int) -> Coordinates:
        """The coordinates of one representation."""
        coordinates: Coordinates = self.coordinates[index]  # type: ignore[assignment]
        return coordinates

    def unit_variance(self, index: int, h: Tensor) -> Tensor:
        """``u_l(x)``: ``(B,)`` in float64, for representation ``index`` of shape ``(B, ...)``."""
        with full_precision(h):  # whatever the network computes in
            return self.at(index).unit_variance(h)

    def read(
        self, posterior: Posterior, layers: Sequence[str], x: Tensor, run: Callable[[Tensor], T]
    ) -> tuple[T, list[Tensor]]:
        """``run(x)``, and ``u`` of all layers but the input from that pass through the network."""
        columns: dict[int, Tensor] = {}
        waiting: dict[int, Tensor] = {}
        packed = self.packed(x)

        def consume(index: int, h: Tensor) -> None:
            check_rows(layers[index], h, x)
            if packed is not None and index in packed.layers:
                with full_precision(h):
                    waiting[index] = self.at(index).rows(h)  # type: ignore[operator]
            else:
                columns[index] = self.unit_variance(index, h)

        with evaluating(posterior), capture(posterior.network, layers, consume):
            result = run(x)
        if packed is not None:
            columns |= packed.unit_variances(waiting)
        return result, [columns[index] for index in range(1, len(layers))]

    def packed(self, x: Tensor) -> Packed | None:
        """The representations that one kernel takes together, where this call can have it."""
        if not takes_packed(x):
            return None
        return self._packed if in_graph(x) else self.pack()  # whoever makes a graph did so before

    def parts(self) -> dict[int, Parts]:
        """What can be packed, by the index of the representation."""
        return {
            index: part
            for index, coordinates in enumerate(self.coordinates)
            if index > 0
            and isinstance(coordinates, Prototypes)
            and (part := coordinates.parts) is not None
        }

    def pack(self) -> Packed | None:
        """Pack what can be, unless that was done and nothing has changed."""
        parts = self.parts()
        if not parts:
            self._packed = None
        elif self._packed is None or not self._packed.is_of(parts):
            self._packed = Packed(parts)
        return self._packed

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self):  # type: ignore[no-untyped-def]
        return super().__getstate__() | {"_packed": None}  # type: ignore[no-untyped-call]

    def contributions(self, u: Tensor) -> Tensor:
        """What each representation adds, ``(B, L)``, from ``u`` of that shape."""
        # A kernel that is switched off stays off, also where its u is infinite.
        return torch.where(self.sigma2 > 0, u, 0.0) * self.sigma2

    def forward(self, u: Tensor) -> Tensor:
        """``v(x)``: ``(B,)`` in float64 from ``u`` of shape ``(B, L)``."""
        return self.contributions(u).sum(-1)
