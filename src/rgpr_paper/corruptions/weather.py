"""Weather: snow, frost, fog, and spatter of water or mud."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .family import Family
from .pixels import colour, landscape, smear, smooth, uniform, zoom

__all__ = ["CORRUPTIONS"]

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
ICE = (0.85, 0.95, 1.0)


@dataclass(frozen=True)
class _Snow:
    """How it snows.

    Attributes:
        mean: Mean of the noise that flakes are made of.
        scale: Standard deviation of that noise.
        zoom: Factor by which flakes are enlarged.
        threshold: Noise below this value is no flake.
        radius: Reach of the smear of falling flakes, in pixels.
        sigma: Standard deviation of that smear.
        clear: Weight of the image against its whitened version.
    """

    mean: float
    scale: float
    zoom: float
    threshold: float
    radius: int
    sigma: float
    clear: float


def _snow(x: Tensor, generator: Generator, snow: _Snow) -> Tensor:
    """Flakes, smeared as they fall, over a whitened image."""
    draws = torch.randn(len(x), 1, *x.shape[2:], generator=generator).to(x.device)
    flakes = zoom(snow.mean + snow.scale * draws, snow.zoom)
    flakes = torch.where(flakes < snow.threshold, 0, flakes).clamp(0, 1)
    down = math.pi / 2 + uniform((len(x),), generator, math.pi / 4)
    flakes = smear(flakes, down, snow.radius, snow.sigma)
    luma = torch.tensor([0.299, 0.587, 0.114], device=x.device)
    grey = torch.einsum("nchw,c->nhw", x, luma)[:, None]
    whitened = torch.maximum(x, 1.5 * grey + 0.5)
    spoilt = snow.clear * x + (1 - snow.clear) * whitened
    return spoilt + flakes + flakes.rot90(2, (2, 3))


def _frost(x: Tensor, generator: Generator, clear: float, weight: float) -> Tensor:
    """Patches of ice, with needles that grow from scattered seeds, 60 degrees apart."""
    patches = landscape(x, generator, 1.6)
    seeds = torch.rand((len(x), 1, *x.shape[2:]), generator=generator).to(x.device) < 0.1
    first = uniform((len(x),), generator, math.pi)
    needles = torch.zeros_like(patches)
    for direction in range(3):
        grown = smear(seeds.float(), first + direction * math.pi / 3, 6, 3)
        needles = torch.maximum(needles, 2 * grown)
    ice = (0.2 + 0.8 * patches) * (0.4 + smooth(needles, 0.5))
    return clear * x + weight * ice.clamp(max=1) * colour(ICE, x)


def _fog(x: Tensor, generator: Generator, density: float, decay: float) -> Tensor:
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + density * landscape(x, generator, decay)) * brightest / (brightest + density)


def _spatter(
    x: Tensor, generator: Generator, liquid: str, sigma: float, threshold: float
) -> Tensor:
    """Drops where smooth noise is high: water lightens what is behind it, mud hides it."""
    noise = smooth(torch.randn(len(x), 1, *x.shape[2:], generator=generator).to(x.device), sigma)
    noise = noise / noise.std((1, 2, 3), keepdim=True)
    if liquid == "mud":
        drops = smooth((noise > threshold).float(), 0.5)
        return x * (1 - drops) + drops * colour(MUD, x)
    drops = smooth((noise - threshold).clamp(0, 1), 0.5)
    return x + 0.5 * drops * colour(WATER, x)


CORRUPTIONS: Family = {
    "snow": (
        _snow,
        [
            (_Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.95),),
            (_Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.9),),
            (_Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),),
            (_Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),),
            (_Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),),
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
}
