"""Nineteen ways to spoil a colour photograph, in five severities each, made in batches.

Kinds and names are those of CIFAR-10-C (Hendrycks and Dietterich, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations", ICLR 2019). The images are made by this file:
they are not the published ones, and a result on them must say so.

Settings are the published ones for 32 x 32 images, except where those need what is not here, or do
not take CIFAR-10's images further from the originals from one severity to the next:

- ``glass_blur``: ordered by strength, since more smoothing undoes some of it; of two settings that
  are the same to within a grey level, the weaker has ``sigma`` 0.35.
- ``motion_blur``: severities 3 and 4 are the same to within a grey level; 4 has ``sigma`` 2.25.
- ``saturate``: ordered by strength, which mixes less and more saturation.
- ``elastic_transform``: in the published one the shift of the whole image shrinks while the local
  waves grow. Here it keeps its median, and severity 2 has visible waves.
- ``frost``: a made texture instead of photographs, with more weight at severities 4 and 5.
- ``spatter``: drops of smooth noise without the published relief; water at 1 to 3, mud at 4 and 5.

Zooming, warping and smearing are written anew, so that single pixels of other kinds differ too.
Random numbers are drawn on the CPU: every device makes the same images, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BytesIO
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

__all__ = ["KINDS", "SEVERITIES", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 500  # images at a time: they stay in the cache of a CPU, and memory stays small
WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
ICE = (0.85, 0.95, 1.0)


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """The images, spoilt.

    Args:
        images: ``(N, 3, H, W)`` in uint8, on any device, 8 x 8 or larger; the settings are meant
            for 32 x 32.
        kind: One of :data:`KINDS`.
        severity: From 1, the weakest, to 5.
        seed: Of what is random. Another kind draws other numbers; the severities of a kind start
            from the same.

    Returns:
        New images, of the same shape, type and device.

    Raises:
        ValueError: There is no such kind or severity, or these are not colour images in uint8.
    """
    if kind not in _CORRUPTIONS:
        raise ValueError(f"no corruption '{kind}'; there are {', '.join(KINDS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity!r} of '{kind}': expected a whole number from 1 to 5")
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3 or min(shape[2:]) < 8:
        raise ValueError(
            f"cannot corrupt {images.dtype} of shape {shape}; expected uint8 images (N, 3, H, W), "
            "8 x 8 or larger; grey ones need their channel three times"
        )
    spoil, settings = _CORRUPTIONS[kind]
    setting = settings[int(severity) - 1]
    generator = Generator().manual_seed(crc32(f"{kind} {seed}".encode()))
    result = torch.empty_like(images)
    for start in range(0, len(images), CHUNK):
        rows = slice(start, start + CHUNK)
        spoilt = spoil(images[rows].float() / 255, generator, *setting)
        result[rows] = (spoilt * 255).round().clamp(0, 255).byte()
    return result


# -- noise ---------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, generator: Generator, scale: float) -> Tensor:
    return x + scale * torch.randn(x.shape, generator=generator).to(x.device)


def _shot_noise(x: Tensor, generator: Generator, photons: float) -> Tensor:
    """So many photons at the brightest, counted."""
    return torch.poisson(x.cpu() * photons, generator=generator).to(x.device) / photons


def _impulse_noise(x: Tensor, generator: Generator, share: float) -> Tensor:
    """A share of the values becomes black or white."""
    draws = torch.rand(x.shape, generator=generator).to(x.device)
    return torch.where(draws < share, (draws < share / 2).to(x), x)


def _speckle_noise(x: Tensor, generator: Generator, scale: float) -> Tensor:
    return x + x * scale * torch.randn(x.shape, generator=generator).to(x.device)


# -- blur ----------------------------------------------------------------------------------------


def _gaussian_blur(x: Tensor, _: Generator, sigma: float) -> Tensor:
    return _smooth(x, sigma)


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
    x = _smooth(x, sigma)
    for _ in range(rounds):
        neighbour = torch.randint(4, (len(x), *x.shape[2:]), generator=generator)
        x = _take(x, -(neighbour // 2).to(x.device), -(neighbour % 2).to(x.device))
    return _smooth(x, sigma)


def _motion_blur(x: Tensor, generator: Generator, radius: int, sigma: float) -> Tensor:
    """Smeared along a line within 45 degrees of the horizontal."""
    return _smear(x, _uniform((len(x),), generator, math.pi / 4), radius, sigma)


def _zoom_blur(x: Tensor, _: Generator, steps: int) -> Tensor:
    """The mean of the image and of ``steps`` more, each one per cent larger than the last."""
    return (x + sum(_zoom(x, 1 + 0.01 * step) for step in range(steps))) / (1 + steps)


# -- weather -------------------------------------------------------------------------------------


def _snow(
    x: Tensor,
    generator: Generator,
    mean: float,
    scale: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    clear: float,
) -> Tensor:
    """Flakes, smeared as they fall, over a whitened image."""
    flakes = mean + scale * torch.randn(len(x), 1, *x.shape[2:], generator=generator).to(x.device)
    flakes = _zoom(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    down = math.pi / 2 + _uniform((len(x),), generator, math.pi / 4)
    flakes = _smear(flakes, down, radius, sigma)
    luma = torch.tensor([0.299, 0.587, 0.114], device=x.device)
    grey = torch.einsum("nchw,c->nhw", x, luma)[:, None]
    whitened = torch.maximum(x, 1.5 * grey + 0.5)
    return clear * x + (1 - clear) * whitened + flakes + flakes.rot90(2, (2, 3))


def _frost(x: Tensor, generator: Generator, clear: float, weight: float) -> Tensor:
    """Patches of ice, with needles that grow from scattered seeds, 60 degrees apart."""
    patches = _landscape(x, generator, 1.6)
    seeds = torch.rand((len(x), 1, *x.shape[2:]), generator=generator).to(x.device) < 0.1
    first = _uniform((len(x),), generator, math.pi)
    needles = torch.zeros_like(patches)
    for direction in range(3):
        grown = _smear(seeds.float(), first + direction * math.pi / 3, 6, 3)
        needles = torch.maximum(needles, 2 * grown)
    ice = (0.2 + 0.8 * patches) * (0.4 + _smooth(needles, 0.5))
    return clear * x + weight * ice.clamp(max=1) * _colour(ICE, x)


def _fog(x: Tensor, generator: Generator, density: float, decay: float) -> Tensor:
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + density * _landscape(x, generator, decay)) * brightest / (brightest + density)


def _spatter(
    x: Tensor, generator: Generator, liquid: str, sigma: float, threshold: float
) -> Tensor:
    """Drops where smooth noise is high: water lightens what is behind it, mud hides it."""
    noise = _smooth(torch.randn(len(x), 1, *x.shape[2:], generator=generator).to(x.device), sigma)
    noise = noise / noise.std((1, 2, 3), keepdim=True)
    if liquid == "mud":
        drops = _smooth((noise > threshold).float(), 0.5)
        return x * (1 - drops) + drops * _colour(MUD, x)
    drops = _smooth((noise - threshold).clamp(0, 1), 0.5)
    return x + 0.5 * drops * _colour(WATER, x)


# -- colour --------------------------------------------------------------------------------------


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
    lack = torch.where(spread > 0, (value - x) / spread, 1 - _colour((1.0, 0.0, 0.0), x))
    saturation = torch.where(value > 0, spread / value, 0)
    return value * (1 - (factor * saturation + more).clamp(0, 1) * lack)


# -- geometry and coding -------------------------------------------------------------------------


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
    moves = _uniform((len(x), 2, 3), generator, shift).to(x.device)
    waves = _uniform((len(x), 2, *x.shape[2:]), generator, height).to(x.device)
    flow = torch.einsum("nap,phw->nahw", moves, corners) + _smooth(waves, sigma)
    return _warp(x, flow)


def _pixelate(x: Tensor, _: Generator, factor: float) -> Tensor:
    """Made smaller by boxes, and as large as before by repetition."""
    rows, columns = (_boxes(n, int(n * factor), x.device) for n in x.shape[2:])
    return rows @ x @ columns.T


def _jpeg_compression(x: Tensor, _: Generator, quality: int) -> Tensor:
    from PIL import Image

    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for pixel in pixels:
        with BytesIO() as file:
            Image.fromarray(pixel).save(file, "JPEG", quality=quality)
            pixel[:] = np.asarray(Image.open(file))
    return torch.from_numpy(pixels).to(x.device).permute(0, 3, 1, 2).float() / 255


# -- helpers -------------------------------------------------------------------------------------


def _uniform(shape: tuple[int, ...], generator: Generator, most: float) -> Tensor:
    """Between ``-most`` and ``most``."""
    return (2 * torch.rand(shape, generator=generator) - 1) * most


def _colour(values: tuple[float, ...], x: Tensor) -> Tensor:
    return torch.tensor(values, device=x.device)[:, None, None]


def _smooth(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur to four standard deviations; the outermost pixels go on for ever."""
    reach = int(4 * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1, device=x.device)
    weights = torch.softmax(-offsets.square() / (2 * sigma**2), 0)

    def along(n: int) -> Tensor:
        source = (torch.arange(n, device=x.device)[:, None] + offsets).clamp(0, n - 1)
        return torch.zeros(n, n, device=x.device).scatter_add_(1, source, weights.expand(n, -1))

    return along(x.shape[2]) @ x @ along(x.shape[3]).T


def _zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarged about its centre, with bilinear interpolation."""

    def along(n: int) -> Tensor:
        from_centre = torch.arange(n, device=x.device) - (n - 1) / 2
        return (1 - (from_centre[:, None] / factor - from_centre).abs()).clamp(min=0)

    return along(x.shape[2]) @ x @ along(x.shape[3]).T


def _boxes(n: int, fewer: int, device: torch.device) -> Tensor:
    """``(n, n)``: the mean over the pixels whose centres lie in the same of ``fewer`` boxes."""
    centres = torch.arange(n, dtype=torch.float64, device=device) + 0.5
    boxes = (torch.arange(fewer, dtype=torch.float64, device=device) + 0.5) * n / fewer
    offset = (centres - boxes[:, None]) * fewer / n
    inside = ((offset > -0.5) & (offset <= 0.5)).float()
    means = inside / inside.sum(1, keepdim=True)
    return means[(centres * fewer / n).long()]


def _take(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The pixel so far away, ``(N, H, W)`` or broadcast to it; the outermost go on for ever."""
    count, channels, height, width = x.shape
    rows = (torch.arange(height, device=x.device)[:, None] + down).clamp(0, height - 1)
    columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
    source = (rows * width + columns).expand(count, height, width).reshape(count, 1, -1)
    return x.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(x)


def _smear(x: Tensor, angle: Tensor, radius: int, sigma: float) -> Tensor:
    """Half a Gaussian along a line, of at most ``2 * radius`` pixels; ``angle`` is ``(N,)``."""
    steps = torch.arange(min(2 * radius, math.ceil(4 * sigma)) + 1)
    weights = torch.softmax(-steps.square() / (2 * sigma**2), 0).tolist()
    angle = angle[:, None, None]
    result = torch.zeros_like(x)
    for step, weight in enumerate(weights):
        down, right = (step * angle.sin()).round().long(), (step * angle.cos()).round().long()
        result.add_(_take(x, down.to(x.device), right.to(x.device)), alpha=weight)
    return result


def _warp(x: Tensor, flow: Tensor) -> Tensor:
    """Each pixel from ``flow``, ``(N, 2, H, W)``, rows and columns away; mirrored at the edge."""
    height, width = x.shape[2:]
    rows = 2 * (torch.arange(height, device=x.device)[:, None] + flow[:, 0]) / (height - 1) - 1
    columns = 2 * (torch.arange(width, device=x.device) + flow[:, 1]) / (width - 1) - 1
    grid = torch.stack([columns, rows], 3)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def _landscape(x: Tensor, generator: Generator, decay: float) -> Tensor:
    """Heights from 0 to 1, ``(N, 1, H, W)``, by the diamond-square rule on a torus.

    Halfway points are the mean of their four neighbours plus noise, which is ``decay**2`` weaker
    each time that the step is halved.
    """
    heights, noise = torch.zeros(len(x), 1, 1), 1.0

    def between(a: Tensor, b: Tensor, axis: int) -> Tensor:
        """Means of neighbours: of ``a`` along the axis, and of ``b`` across it."""
        mean = (a + a.roll(-1, axis) + b + b.roll(1, 3 - axis)) / 4
        return mean + _uniform(tuple(mean.shape), generator, noise)

    while heights.shape[1] < max(x.shape[2:]):
        along = heights + heights.roll(-1, 2)
        middles = (along + along.roll(-1, 1)) / 4
        middles = middles + _uniform(tuple(middles.shape), generator, noise)
        upper = torch.stack([heights, between(heights, middles, 2)], 3).flatten(2)
        lower = torch.stack([between(heights, middles, 1), middles], 3).flatten(2)
        heights = torch.stack([upper, lower], 2).flatten(1, 2)
        noise /= decay**2
    heights = heights - heights.amin((1, 2), keepdim=True)
    heights = heights / heights.amax((1, 2), keepdim=True)
    return heights[:, None, : x.shape[2], : x.shape[3]].to(x.device)


# -- settings ------------------------------------------------------------------------------------

_CORRUPTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[Any, ...]]]] = {
    "gaussian_noise": (_gaussian_noise, [(0.04,), (0.06,), (0.08,), (0.09,), (0.10,)]),
    "shot_noise": (_shot_noise, [(500,), (250,), (100,), (75,), (50,)]),
    "impulse_noise": (_impulse_noise, [(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)]),
    "speckle_noise": (_speckle_noise, [(0.06,), (0.1,), (0.12,), (0.16,), (0.2,)]),
    "defocus_blur": (_defocus_blur, [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]),
    "glass_blur": (_glass_blur, [(0.4, 1), (0.35, 1), (0.25, 1), (0.4, 2), (0.25, 2)]),
    "motion_blur": (_motion_blur, [(6, 1.0), (6, 1.5), (6, 2.0), (8, 2.25), (9, 2.5)]),
    "zoom_blur": (_zoom_blur, [(6,), (11,), (16,), (21,), (26,)]),
    "gaussian_blur": (_gaussian_blur, [(0.4,), (0.6,), (0.7,), (0.8,), (1.0,)]),
    "snow": (
        _snow,
        [
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ],
    ),
    "frost": (_frost, [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.5), (0.75, 0.6)]),
    "fog": (_fog, [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)]),
    "spatter": (
        _spatter,
        [
            ("water", 0.7, 1.5),
            ("water", 0.8, 1.0),
            ("water", 0.9, 0.7),
            ("mud", 1.0, 1.2),
            ("mud", 1.2, 0.9),
        ],
    ),
    "brightness": (_brightness, [(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)]),
    "contrast": (_contrast, [(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)]),
    "saturate": (_saturate, [(1.5, 0), (0.3, 0), (0.1, 0), (2, 0.1), (2.5, 0.2)]),
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

KINDS = tuple(_CORRUPTIONS)
