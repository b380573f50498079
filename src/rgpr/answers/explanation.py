"""Why is this one strange? How far each representation is, and what it adds to the variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood
from ..posteriors.gaussian import Gaussian
from .probabilities import answer, known
from .score import score

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What each representation has to do with an input's strangeness; ``print`` it for a table.

    Attributes:
        layers: The representations.
        variance: What each adds, ``(B, L)``: the rows sum to ``model.variance(x)``.
        strangeness: The cube of each one's distance from the data, in units of its median at the
            data, ``(B, L)``. A unit that never varied at the data, such as a pixel that was always
            black, is measured in the scale of its layer, so its firing gives large numbers.
        score: ``model.score(x)``, ``(B,)``.
        confidence: Largest probability of the prediction, ``(B,)``, of several labels that of the
            one it is surest about to be there or not; regression has none.
    """

    layers: Sequence[str]
    variance: Tensor
    strangeness: Tensor
    score: Tensor
    confidence: Tensor | None

    @property
    def total(self) -> Tensor:
        """``v(x)``, ``(B,)``."""
        return self.variance.sum(1)

    @property
    def share(self) -> Tensor:
        """The part of ``v(x)`` that each layer adds, ``(B, L)``; rows sum to one or are zero."""
        return _shares(self.variance)

    def __str__(self) -> str:
        width = max(8, *map(len, self.layers))
        head = "  ".join(f"{layer:>{width}}" for layer in self.layers)
        lines = [f"{'row':>5}  {'score':>8}  {'confidence':>10}  {'variance':>10}  {head}"]
        confidences = [None] * len(self.variance)
        if self.confidence is not None:
            confidences = self.confidence.tolist()
        rows = zip(
            self.score.tolist(),
            confidences,
            self.total.tolist(),
            self.strangeness.tolist(),
            strict=True,
        )
        for number, (strange, confidence, total, distances) in enumerate(rows):
            parts = "  ".join(f"{distance:>{width}.3g}" for distance in distances)
            shown = "-" if confidence is None else f"{confidence:.3f}"
            lines.append(f"{number:>5}  {strange:>8.2f}  {shown:>10}  {total:>10.3g}  {parts}")
        lines += [
            "score: how strange the input is; the higher, the stranger",
            "variance: what is added to that of each output; 0 leaves the base's answer as it is",
            "columns of layers: how far from the training data this layer finds the input. 1 is "
            "the median of the training data, 8 twice as far, 1000 ten times as far (distances "
            "cubed)",
        ]
        return "\n".join(lines)


def explain(extension: Extension, reading: Reading[Gaussian]) -> Explanation:
    """The explanation of a batch, from one pass over it."""
    residual, u = extension.residual, known(reading.u, reading.dtype)
    answered: Any = answer(extension, reading)
    confidence = None
    if isinstance(extension.likelihood, LabelLikelihood):
        confidence = extension.likelihood.confidence(answered).double()
    parts = residual.contributions(u)
    if residual.onset is not None:
        # The kernel is that of the sum times a(x) a(x'), so each layer has its part of the sum.
        share, v = _shares(parts), residual(u)[:, None]
        parts = torch.where((share == 0) | (v == 0), 0.0, share * v)
    typical = torch.where(residual.typical > 0, residual.typical, 1.0)
    strange = score(extension, reading)
    return Explanation(extension.layers, parts, u / typical, strange, confidence)


def _shares(parts: Tensor) -> Tensor:
    """Parts of their sum, ``(B, L)``; of an infinite one the infinite parts have it all."""
    infinite = parts.isinf()
    parts = torch.where(infinite.any(1, keepdim=True), infinite.double(), parts)
    total = parts.sum(1, keepdim=True)
    return torch.where(total > 0, parts / total, parts)
