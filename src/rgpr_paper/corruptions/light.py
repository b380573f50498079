"""Light and colour: brightness, contrast and saturation."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .family import Family
from .pixels import colour

__all__ = ["CORRUPTIONS"]


def _brightness(x: Tensor, _: Generator, more: float) -> Tensor:
    """A larger value, with hue and saturation as they are."""
    value = x.amax(1, keepdim=True)
    larger = (value + more).clamp(max=1)
    return torch.where(value > 0, x * larger / value, larger)


def _contrast(x: Tensor, _: Generator, factor: float) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _saturate(x: Tensor, _: Generator, factor: float, more: float) -> Tensor:
    """Another saturation, with hue and value as they are; the hue of grey is red."""
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    lack = torch.where(spread > 0, (value - x) / spread, 1 - colour((1.0, 0.0, 0.0), x))
    saturation = torch.where(value > 0, spread / value, 0)
    return value * (1 - (factor * saturation + more).clamp(0, 1) * lack)


CORRUPTIONS: Family = {
    "brightness": (_brightness, [(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)]),
    "contrast": (_contrast, [(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)]),
    "saturate": (_saturate, [(1.5, 0), (0.3, 0), (0.1, 0), (2, 0.1), (2.5, 0.2)]),
}
