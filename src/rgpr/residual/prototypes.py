"""The distance from the nearest class mean, in units of the spread within classes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backend.arithmetic import (
    all_finite,
    can_look,
    cubes_beyond,
    nearest,
    nearest_cubes,
    peak_out,
)
from .._backend.precision import at_least_float32
from .._backend.small_layers import Parts
from .coordinates import Coordinates, reduce

__all__ = ["Prototypes"]

# Means that are turned to the axes at a time.
_ROWS = 1024


class Prototypes(Coordinates):
    r"""The distance from the nearest prototype along principal axes, each in its own spread.

    .. math:: \rho(h) = \min_k \sqrt{\tfrac1D \, \| (h - \mu_k) A \|^2}

    With one prototype this is whitening. The nearest one is found by products of matrices, so
    thousands of them take no memory beyond a number for each pair. Rows are measured from the mean
    of the prototypes before they are multiplied: activations far from zero would otherwise lose
    their digits in differences of large products. For the same reason the nearest prototype is
    taken off before the product that gives the coordinates. A product rounds in another way in
    batches of another size, so the coordinates of a row would otherwise depend on its batch where
    classes lie far apart. Kernels of other devices subtract afterwards, which takes one product.

    Args:
        means: :math:`\mu`, ``(K, D)``.
        seen: Which of the means are prototypes, ``(K,)``; all by default. The others are zero.
        covariance: ``(D, D)``, within classes; or the variances alone, ``(D,)``, which leaves
            the axes where they are.
        shrinkage: Share of the mean variance that is put in place of each direction's own:
            directions that hardly varied would otherwise outweigh all others.
        r: Factor on the spread.
        dtype: Dtype to compute in, at least float32.
        of: ``"raw"``, ``"pooled"`` or ``"normalised"``.
    """

    kind = "prototypes"
    needed = ("axes", "centers", "origin")
    axes: Tensor
    centers: Tensor
    origin: Tensor
    onto: Tensor
    halves: Tensor
    means: Tensor

    def __init__(
        self,
        means: Tensor,
        covariance: Tensor,
        *,
        seen: Tensor | None = None,
        shrinkage: float = 0.1,
        r: float = 1.0,
        dtype: torch.dtype = torch.float32,
        of: str = "pooled",
    ) -> None:
        variances = covariance if covariance.dim() == 1 else covariance.diagonal()
        typical = variances.mean()
        typical = torch.where(typical > 0, typical, 1.0)
        values, vectors = variances, torch.ones_like(variances)
        if covariance.dim() == 2:
            # Among directions of equal variance any axes will do: a distance has no direction.
            values, vectors = torch.linalg.eigh(covariance)
        values = (1 - shrinkage) * values + shrinkage * typical
        axes = vectors * values.clamp_min(1e-12 * typical).rsqrt() / r
        dtype = at_least_float32(dtype)
        seen = torch.ones_like(means[:, 0], dtype=torch.bool) if seen is None else seen
        origin = (means.sum(0, dtype=axes.dtype) / seen.sum()).to(dtype)
        rows = seen.nonzero().flatten()
        centers = origin.new_empty(len(rows), len(origin))
        # In parts: of many classes the means alone fill the memory.
        for part, into in zip(*(torch.split(t, _ROWS) for t in (rows, centers)), strict=True):
            # Measured from the origin as it is stored, whose rounding then cancels.
            moved = means[part].to(axes.dtype) - origin.to(axes.dtype)
            into.copy_(moved * axes if axes.dim() == 1 else moved @ axes)
        tensors = {"axes": axes.to(dtype), "centers": centers, "origin": origin}
        super().__init__(of, tensors, own=True)

    def _derive(self) -> None:
        if self.axes.dim() == 2:
            # One product gives the coordinates and how close each center is.
            width, count = len(self.axes), len(self.centers)
            onto = self.axes.new_empty(width + count, width)
            onto[:width] = self.axes.T
            torch.mm(self.centers, self.axes.T, out=onto[width:])
        else:
            onto = self.axes * self.centers
        # Products with a few centers are twice as fast where each center lies in one piece.
        self.register_buffer("onto", onto.T, persistent=False)
        squares = [part.square().sum(1) for part in torch.split(self.centers, _ROWS)]
        self.register_buffer("halves", torch.cat(squares) / 2, persistent=False)
        # Of axes whose columns are orthogonal, the inverse takes no solver.
        axes = self.axes.double()
        back = axes.square().sum(0).reciprocal()[:, None] * axes.T if axes.dim() == 2 else 1 / axes
        means = torch.empty_like(self.centers)
        for part, into in zip(*(torch.split(t, _ROWS) for t in (self.centers, means)), strict=True):
            into.copy_(part.double() @ back if back.dim() == 2 else part.double() * back)
        self.register_buffer("means", means, persistent=False)

    def _load_from_state_dict(self, *arguments):  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*arguments)
        self._derive()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        width = self.origin.numel()
        axes = (width,) * self.axes.dim()
        return {"axes": axes, "centers": (len(self.centers), width), "origin": (width,)}

    @property
    def joint_units(self) -> int:
        return len(self.origin)

    def forward(self, h: Tensor) -> Tensor:
        """The distance, ``(B, 1)`` in float64."""
        rows, peak = peak_out(self._rows(h) - self.origin)
        z = self._deviations(rows, peak).double()
        distance = z.square().mean(1, keepdim=True).sqrt() * peak.double()
        # An infinite entry is infinitely far, and not the NaN of its product with a zero.
        return torch.where(peak.isfinite(), distance, peak)

    def unit_variance(self, h: Tensor) -> Tensor:
        return self.of_rows(self._rows(h))

    def of_rows(self, rows: Tensor) -> Tensor:
        """:meth:`unit_variance` of what :meth:`rows` returns."""
        looks, rows = can_look(rows), rows - self.origin
        if not looks:
            return self._safely(rows)
        # Only rows that overflow need their peak out.
        u = cubes_beyond(self._deviations(rows, None), None, self.offset)
        return u if all_finite(u) else torch.where(u.isfinite(), u, self._safely(rows))

    def _safely(self, rows: Tensor) -> Tensor:
        rows, peak = peak_out(rows)
        if rows.device.type == "cpu":
            return cubes_beyond(self._deviations(rows, peak), peak, self.offset)
        return nearest_cubes(self._products(rows), self.centers, self.halves, peak, self.offset)

    def _deviations(self, rows: Tensor, peak: Tensor | None) -> Tensor:
        """Coordinates of the deviations from the nearest prototype, ``(B, D)``.

        Args:
            rows: Deviations from the origin, divided by ``peak``.
            peak: ``(B, 1)``, or ``None`` for ones.
        """
        means, dense = self.means, self.axes.dim() == 2
        if len(means) > 1:
            onto = self.onto[:, len(self.origin) :] if dense else self.onto
            means = means.index_select(0, nearest(rows @ onto, self.halves, peak))
        deviations = rows - (means if peak is None else means / peak)
        return deviations @ self.axes if dense else deviations * self.axes

    @property
    def parts(self) -> Parts | None:
        """What can be packed with other layers, if it can and their rows can wait."""
        parts = Parts(self.origin, self.onto, self.centers, self.halves, self.offset)
        return parts if self.of != "raw" and parts.fit else None

    def rows(self, h: Tensor) -> Tensor:
        """What is to be measured of a representation, in memory of its own."""
        rows = self._rows(h)
        shares = self.of == "pooled" and h.dim() == 2 and rows.dtype == h.dtype
        return rows.clone() if shares else rows

    def spread_of(self, directions: Tensor) -> Tensor:
        r"""How much ``directions @ h`` can grow with the distance: bounds of its slope, ``(M,)``.

        For :math:`d = h - \mu_k` with coordinates :math:`z = d A`, a product :math:`w^\top d` is
        :math:`z A^{-1} w`, so :math:`|w^\top d| \le \sqrt D \rho\, \|A^{-1} w\|`.

        Args:
            directions: :math:`w`, ``(M, D)`` in float64.
        """
        axes = self.axes.double()
        back = directions / axes if axes.dim() == 1 else torch.linalg.solve(axes, directions.T).T
        slopes: Tensor = len(self.origin) ** 0.5 * torch.linalg.vector_norm(back, dim=1)
        return slopes

    def anchors(self) -> Tensor:
        """The prototypes as representations, ``(K, D)`` in float64."""
        axes, centers = self.axes.double(), self.centers.double()
        means = centers / axes if axes.dim() == 1 else torch.linalg.solve(axes.T, centers.T).T
        return means + self.origin.double()

    def _rows(self, h: Tensor) -> Tensor:
        vectors = h.dim() == 2 and self.of != "normalised"  # which need no reducing
        return (h if vectors else reduce(h, self.of)).to(self.axes.dtype)

    def _products(self, rows: Tensor) -> Tensor:
        if self.axes.dim() == 2:
            return rows @ self.onto
        return torch.cat([rows * self.axes, rows @ self.onto], 1)
