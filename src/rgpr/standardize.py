r"""Standardisation of a representation: :math:`h \mapsto (h - \text{mean}) / (r\,\text{std})`.

The moments come from one pass. Each batch is reduced around its own mean and merged by the
pairwise rule of Chan, Golub and LeVeque, in float64, so the result does not depend on the size or
the order of the batches beyond rounding.

**Units that never varied.** A dead unit or a constant pixel has no standard deviation to divide
by, yet its firing is strong evidence of a strange input. It is measured in the scale of its
layer: the median standard deviation of the units that did vary, or one if none did. A unit counts
as constant when its spread is within the rounding of its own values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Moments", "StableBuffers", "Standardizer"]


class StableBuffers(nn.Module):
    """A module whose own buffers follow ``.to(device)`` but keep their dtype.

    ``model.half()`` is about the speed of the network; statistics in half precision would be
    wrong rather than fast.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self


class Moments:
    """Running mean and sum of squared deviations of each unit, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.squares = torch.zeros(0, dtype=torch.float64)
        self.resolution = 0.0

    def update(self, h: Tensor) -> None:
        """Take in a batch of shape ``(B, ...)``; every entry of one example is a unit."""
        h = h.flatten(1)
        if len(h) == 0:
            return
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        mean = h.mean(0, dtype=torch.float64)
        # Deviations from the rounded mean, corrected for its rounding: no float64 copy of h.
        deviation = h - mean.to(h.dtype)
        drift = deviation.mean(0, dtype=torch.float64)
        squares = torch.linalg.vector_norm(deviation, dim=0, dtype=torch.float64).square()
        squares = (squares - len(h) * drift.square()).clamp_min(0)
        self.resolution = max(self.resolution, torch.finfo(h.dtype).eps)
        self._merge(len(h), mean, squares)

    def _merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """Population standard deviation of each unit; zero for one that never varied."""
        std = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(std <= 4 * self.resolution * self.mean.abs(), 0.0, std)


class Standardizer(StableBuffers):
    """Maps a representation ``(B, ...)`` to its standardised units ``(B, N)``.

    Args:
        mean: ``(N,)``.
        std: ``(N,)``; a zero is replaced by the layer's own scale, see above.
        r: The paper's factor on the standard deviation; larger makes the residual flatter.
        dtype: Dtype to compute in, at least float32.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, mean: Tensor, std: Tensor, *, r: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        varied = std > 0
        layer_scale = std[varied].median() if bool(varied.any()) else std.new_ones(())
        scale = r * torch.where(varied, std, layer_scale)
        dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer("mean", mean.to(dtype))
        self.register_buffer("scale", scale.to(dtype))

    def forward(self, h: Tensor) -> Tensor:
        return (h.flatten(1) - self.mean).div_(self.scale)
