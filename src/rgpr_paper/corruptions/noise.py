"""Noise on single values: Gaussian, shot, impulse and speckle noise."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .family import Family

__all__ = ["CORRUPTIONS"]


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


CORRUPTIONS: Family = {
    "gaussian_noise": (_gaussian_noise, [(0.04,), (0.06,), (0.08,), (0.09,), (0.10,)]),
    "shot_noise": (_shot_noise, [(500,), (250,), (100,), (75,), (50,)]),
    "impulse_noise": (_impulse_noise, [(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)]),
    "speckle_noise": (_speckle_noise, [(0.06,), (0.1,), (0.12,), (0.16,), (0.2,)]),
}
