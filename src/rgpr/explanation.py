"""Why is this one flagged? What each representation adds to the variance of an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """The residual's variance by representation; ``print`` it for a table.

    Attributes:
        layers: The representations.
        variance: What each adds, ``(B, L)``: the rows sum to ``model.variance(x)``.
        confidence: Of the prediction, ``(B,)``; regression has none.
    """

    layers: Sequence[str]
    variance: Tensor
    confidence: Tensor | None

    @property
    def total(self) -> Tensor:
        """``v(x)``, ``(B,)``."""
        return self.variance.sum(1)

    @property
    def share(self) -> Tensor:
        """The part of ``v(x)`` that each layer adds, ``(B, L)``; rows sum to one or are zero."""
        # Of an infinite variance, the infinite parts have it all.
        infinite = self.variance.isinf()
        variance = torch.where(infinite.any(1, keepdim=True), infinite.double(), self.variance)
        total = variance.sum(1, keepdim=True)
        return torch.where(total > 0, variance / total, variance)

    def __str__(self) -> str:
        width = max(8, *map(len, self.layers))
        head = "  ".join(f"{layer:>{width}}" for layer in self.layers)
        lines = [f"{'input':>5}  {'confidence':>10}  {'v(x)':>10}  {head}"]
        confidences = [None] * len(self.variance)
        if self.confidence is not None:
            confidences = self.confidence.tolist()
        rows = zip(confidences, self.total.tolist(), self.share.tolist(), strict=True)
        for number, (confidence, total, shares) in enumerate(rows):
            parts = "  ".join(f"{share:>{width}.0%}" for share in shares)
            shown = "-" if confidence is None else f"{confidence:.3f}"
            lines.append(f"{number:>5}  {shown:>10}  {total:>10.3g}  {parts}")
        return "\n".join(lines)
