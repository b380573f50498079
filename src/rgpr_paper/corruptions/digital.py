"""Geometry and coding: elastic waves, coarse pixels, and JPEG."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from torch import Generator, Tensor

from .family import Family
from .pixels import boxes, smooth, uniform, warp

__all__ = ["CORRUPTIONS"]


def _elastic_transform(
    x: Tensor, generator: Generator, height: float, sigma: float, shift: float
) -> Tensor:
    """Warped by smooth waves, and by an affine map that moves three points by up to ``shift``.

    The points are three corners of the square of two thirds of the image's side.
    """
    rows, columns = (torch.linspace(-1.5, 1.5, n, device=x.device) for n in x.shape[2:])
    first = (columns + 1).expand(len(rows), -1) / 2
    third = (1 - rows[:, None]).expand(-1, len(columns)) / 2
    corners = torch.stack([first, 1 - first - third, third])
    moves = uniform((len(x), 2, 3), generator, shift).to(x.device)
    waves = uniform((len(x), 2, *x.shape[2:]), generator, height).to(x.device)
    flow = torch.einsum("nap,phw->nahw", moves, corners) + smooth(waves, sigma)
    return warp(x, flow)


def _pixelate(x: Tensor, _: Generator, factor: float) -> Tensor:
    """Made smaller by boxes, and as large as before by repetition."""
    rows, columns = (boxes(n, int(n * factor), x.device) for n in x.shape[2:])
    return rows @ x @ columns.T


def _jpeg_compression(x: Tensor, _: Generator, quality: int) -> Tensor:
    from PIL import Image

    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for pixel in pixels:
        with BytesIO() as file:
            Image.fromarray(pixel).save(file, "JPEG", quality=quality)
            pixel[:] = np.asarray(Image.open(file))
    return torch.from_numpy(pixels).to(x.device).permute(0, 3, 1, 2).float() / 255


CORRUPTIONS: Family = {
    "elastic_transform": (
        _elastic_transform,
        [
            (0, 1.92, 1.92),
            (1.6, 1.92, 1.92),
            (2.56, 1.92, 1.92),
            (3.2, 1.28, 1.92),
            (3.2, 0.96, 1.92),
        ],
    ),
    "pixelate": (_pixelate, [(0.95,), (0.9,), (0.85,), (0.75,), (0.65,)]),
    "jpeg_compression": (_jpeg_compression, [(80,), (65,), (58,), (50,), (40,)]),
}
