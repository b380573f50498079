"""How pixels are moved and mixed: blur, zoom, smear and warp in batches, and random landscapes.

Random numbers are drawn on the CPU, so that every device makes the same images, up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

__all__ = ["boxes", "colour", "landscape", "smear", "smooth", "take", "uniform", "warp", "zoom"]


def uniform(shape: tuple[int, ...], generator: Generator, most: float) -> Tensor:
    """Random numbers between ``-most`` and ``most``, drawn on the CPU."""
    return (2 * torch.rand(shape, generator=generator) - 1) * most


def colour(values: tuple[float, ...], x: Tensor) -> Tensor:
    """One colour, ``(3, 1, 1)``, on the device of ``x``."""
    return torch.tensor(values, device=x.device)[:, None, None]


def smooth(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur to four standard deviations; beyond the edge the outermost pixels repeat."""
    reach = int(4 * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1, device=x.device)
    weights = torch.softmax(-offsets.square() / (2 * sigma**2), 0)

    def along(n: int) -> Tensor:
        source = (torch.arange(n, device=x.device)[:, None] + offsets).clamp(0, n - 1)
        return torch.zeros(n, n, device=x.device).scatter_add_(1, source, weights.expand(n, -1))

    return along(x.shape[2]) @ x @ along(x.shape[3]).T


def zoom(x: Tensor, factor: float) -> Tensor:
    """Images enlarged about their centres, with bilinear interpolation."""

    def along(n: int) -> Tensor:
        from_centre = torch.arange(n, device=x.device) - (n - 1) / 2
        return (1 - (from_centre[:, None] / factor - from_centre).abs()).clamp(min=0)

    return along(x.shape[2]) @ x @ along(x.shape[3]).T


def boxes(n: int, fewer: int, device: torch.device) -> Tensor:
    """``(n, n)``: the mean over the pixels whose centres lie in the same of ``fewer`` boxes."""
    centres = torch.arange(n, dtype=torch.float64, device=device) + 0.5
    middles = (torch.arange(fewer, dtype=torch.float64, device=device) + 0.5) * n / fewer
    offset = (centres - middles[:, None]) * fewer / n
    inside = ((offset > -0.5) & (offset <= 0.5)).float()
    means = inside / inside.sum(1, keepdim=True)
    return means[(centres * fewer / n).long()]


def take(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """For each pixel the one that lies ``down`` rows and ``right`` columns away.

    Both have the shape ``(N, H, W)``, or one that broadcasts to it. Beyond the edge the outermost
    pixels repeat.
    """
    count, channels, height, width = x.shape
    rows = (torch.arange(height, device=x.device)[:, None] + down).clamp(0, height - 1)
    columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
    source = (rows * width + columns).expand(count, height, width).reshape(count, 1, -1)
    return x.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(x)


def smear(x: Tensor, angle: Tensor, radius: int, sigma: float) -> Tensor:
    """A blur by half a Gaussian along a line of at most ``2 * radius`` pixels at ``angle (N,)``."""
    steps = torch.arange(min(2 * radius, math.ceil(4 * sigma)) + 1)
    weights = torch.softmax(-steps.square() / (2 * sigma**2), 0).tolist()
    angle = angle[:, None, None]
    result = torch.zeros_like(x)
    for step, weight in enumerate(weights):
        down, right = (step * angle.sin()).round().long(), (step * angle.cos()).round().long()
        result.add_(take(x, down.to(x.device), right.to(x.device)), alpha=weight)
    return result


def warp(x: Tensor, flow: Tensor) -> Tensor:
    """Takes each pixel from ``flow (N, 2, H, W)`` rows and columns away, mirrored at the edge."""
    height, width = x.shape[2:]
    rows = 2 * (torch.arange(height, device=x.device)[:, None] + flow[:, 0]) / (height - 1) - 1
    columns = 2 * (torch.arange(width, device=x.device) + flow[:, 1]) / (width - 1) - 1
    grid = torch.stack([columns, rows], 3)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def landscape(x: Tensor, generator: Generator, decay: float) -> Tensor:
    """Heights from 0 to 1, ``(N, 1, H, W)``, by the diamond-square rule on a torus.

    Halfway points are the mean of their four neighbours plus noise, which is ``decay**2`` weaker
    each time that the step is halved.
    """
    heights, noise = torch.zeros(len(x), 1, 1), 1.0
    while heights.shape[1] < max(x.shape[2:]):
        along = heights + heights.roll(-1, 2)
        middles = _noisy((along + along.roll(-1, 1)) / 4, generator, noise)
        # Halfway along the rows first, then along the columns: the order decides which random
        # numbers each of them gets.
        right = _noisy(_halfway(heights, middles, 2), generator, noise)
        below = _noisy(_halfway(heights, middles, 1), generator, noise)
        upper = torch.stack([heights, right], 3).flatten(2)
        lower = torch.stack([below, middles], 3).flatten(2)
        heights = torch.stack([upper, lower], 2).flatten(1, 2)
        noise /= decay**2
    heights = heights - heights.amin((1, 2), keepdim=True)
    heights = heights / heights.amax((1, 2), keepdim=True)
    return heights[:, None, : x.shape[2], : x.shape[3]].to(x.device)


def _halfway(heights: Tensor, middles: Tensor, axis: int) -> Tensor:
    """Means of four neighbours: two heights along the axis, and two middles across it."""
    return (heights + heights.roll(-1, axis) + middles + middles.roll(1, 3 - axis)) / 4


def _noisy(heights: Tensor, generator: Generator, most: float) -> Tensor:
    return heights + uniform(tuple(heights.shape), generator, most)
