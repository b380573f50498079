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
from .hooks import evaluating, full_precision
from .packed import Originals, Packed, Packing, Parts, originals_of
from .posteriors import Posterior
from .representations import capture

__all__ = ["Residual"]

T = TypeVar("T")


class Residual(Packing[Packed]):
    """A kernel for each representation, and their scales ``sigma2``.

    Args:
        coordinates: One map per representation, the input's first.
        sigma2: ``(L,)``; zeros by default, which switches the residual off.
    """

    coordinates: nn.ModuleList
    sigma2: Tensor

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

    def _parts(self) -> dict[int, Parts]:
        """What one kernel can take together, by the index of the representation."""
        return {
            index: part
            for index, coordinates in enumerate(self.coordinates)
            if index > 0
            and isinstance(coordinates, Prototypes)
            and (part := coordinates.parts) is not None
        }

    def _originals(self) -> Originals:
        return originals_of(self._parts())

    def _copies(self) -> Packed:
        return Packed(self._parts())

    def contributions(self, u: Tensor) -> Tensor:
        """What each representation adds, ``(B, L)``, from ``u`` of that shape."""
        # A kernel that is switched off stays off, also where its u is infinite.
        return torch.where(self.sigma2 > 0, u, 0.0) * self.sigma2

    def forward(self, u: Tensor) -> Tensor:
        """``v(x)``: ``(B,)`` in float64 from ``u`` of shape ``(B, L)``."""
        return self.contributions(u).sum(-1)
