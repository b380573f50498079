"""Blur: out of focus, through glass, by motion, by zooming, and Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from .family import Family
from .pixels import smear, smooth, take, uniform, zoom

__all__ = ["CORRUPTIONS"]


def _gaussian_blur(x: Tensor, _: Generator, sigma: float) -> Tensor:
    return smooth(x, sigma)


def _defocus_blur(x: Tensor, _: Generator, radius: float, sigma: float) -> Tensor:
    """The mean over a disk whose rim is smoothed."""
    side = torch.arange(-2.0, 3.0)
    disk = (side[:, None].square() + side.square() <= radius**2).float()
    rim = torch.exp(-side.square() / (2 * sigma**2)) * (side.abs() <= 1)
    kernel = F.conv2d(disk[None, None], torch.outer(rim, rim)[None, None], padding=2)[0, 0]
    kernel = kernel / kernel.sum()
    height, width = x.shape[2:]
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    result = torch.zeros_like(x)
    for row, column in kernel.nonzero().tolist():
        part = padded[:, :, row : row + height, column : column + width]
        result.add_(part, alpha=float(kernel[row, column]))
    return result


def _glass_blur(x: Tensor, generator: Generator, sigma: float, rounds: int) -> Tensor:
    """Each pixel keeps its colour, or takes that of a neighbour above, to the left or both."""
    x = smooth(x, sigma)
    for _ in range(rounds):
        neighbour = torch.randint(4, (len(x), *x.shape[2:]), generator=generator)
        x = take(x, -(neighbour // 2).to(x.device), -(neighbour % 2).to(x.device))
    return smooth(x, sigma)


def _motion_blur(x: Tensor, generator: Generator, radius: int, sigma: float) -> Tensor:
    """Smeared along a line within 45 degrees of the horizontal."""
    return smear(x, uniform((len(x),), generator, math.pi / 4), radius, sigma)


def _zoom_blur(x: Tensor, _: Generator, steps: int) -> Tensor:
    """The mean of the image and of ``steps`` more, each one per cent larger than the last."""
    return (x + sum(zoom(x, 1 + 0.01 * step) for step in range(steps))) / (1 + steps)


CORRUPTIONS: Family = {
    "defocus_blur": (_defocus_blur, [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]),
    "glass_blur": (_glass_blur, [(0.4, 1), (0.35, 1), (0.25, 1), (0.4, 2), (0.25, 2)]),
    "motion_blur": (_motion_blur, [(6, 1.0), (6, 1.5), (6, 2.0), (8, 2.25), (9, 2.5)]),
    "zoom_blur": (_zoom_blur, [(6,), (11,), (16,), (21,), (26,)]),
    "gaussian_blur": (_gaussian_blur, [(0.4,), (0.6,), (0.7,), (0.8,), (1.0,)]),
}
