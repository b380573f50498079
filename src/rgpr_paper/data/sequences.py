r"""Sequences made by a formula, with outliers that are near to them and far from them.

A waveform is a sum of sines, :math:`w(t) = \sum_k a_k \cos 2\pi k t + b_k \sin 2\pi k t` over the
frequencies of a band. Each of four channels has a handful of waveforms, and a class says which of
them each channel shows. A sequence of a class is that combination, shifted and warped in time,
every channel with an amplitude of its own, under white noise. All of it follows from seeds.

- Near: combinations of the same waveforms that are no class; and waveforms that no class has, from
  the same band.
- Far: waveforms of a higher band, white noise, and test sequences whose steps were shuffled or
  whose values were multiplied by four.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .image_set import ImageSet

__all__ = ["CHANNELS", "SequenceData", "made_sequences"]

CHANNELS, STEPS, CLASSES = 4, 128, 10
_WAVEFORMS = 4
_BAND, _OTHER_BAND = range(1, 8), range(20, 27)
_NOISE = 3.2


@dataclass(frozen=True)
class SequenceData:
    """Sequences ``(N, C, T)`` in float32, with labels, and outliers by name."""

    train: ImageSet
    test: ImageSet
    near: dict[str, ImageSet]
    far: dict[str, ImageSet]


def made_sequences(train: int, test: int, outliers: int, device: str = "cpu") -> SequenceData:
    """The data set, the same at every call.

    Args:
        train: Number of training sequences.
        test: Number of test sequences.
        outliers: Number of outliers of each kind.
        device: Where the sequences are put; they are made on the CPU, alike for every device.
    """
    generator = torch.Generator().manual_seed(0)
    known = _waveforms(_BAND, generator)
    every = torch.cartesian_prod(*[torch.arange(_WAVEFORMS)] * CHANNELS)
    every = every[torch.randperm(len(every), generator=generator)]
    classes, others = every[:CLASSES], every[CLASSES : 2 * CLASSES]

    def made(
        name: str, count: int, table: Tensor, waveforms: Tensor, band: range = _BAND
    ) -> ImageSet:
        y = torch.randint(CLASSES, (count,), generator=generator)
        x = _drawn(table[y], waveforms, band, generator)
        return ImageSet(name, x.to(device), y.to(device))

    def changed(name: str, x: Tensor) -> ImageSet:
        return ImageSet(name, x, torch.zeros(len(x), dtype=torch.long, device=x.device))

    training = made("sequences", train, classes, known)
    tested = made("sequences", test, classes, known)
    some = tested.x[:outliers].cpu()
    order = torch.rand(len(some), 1, STEPS, generator=generator).argsort(2).expand_as(some)
    noise = torch.randn(outliers, CHANNELS, STEPS, generator=generator)
    near = (
        made("new combinations", outliers, others, known),
        made("new waveforms", outliers, classes, _waveforms(_BAND, generator)),
    )
    far = (
        made("other band", outliers, classes, _waveforms(_OTHER_BAND, generator), _OTHER_BAND),
        changed("shuffled", some.gather(2, order).to(device)),
        changed("times four", 4 * tested.x[:outliers]),
        changed("white noise", (noise * some.std()).to(device)),
    )
    return SequenceData(
        training, tested, {each.name: each for each in near}, {each.name: each for each in far}
    )


def _waveforms(band: range, generator: torch.Generator) -> Tensor:
    """Coefficients ``a`` and ``b``, ``(C, W, 2 K)``, of waveforms with a mean square of one."""
    size = (CHANNELS, _WAVEFORMS, 2 * len(band))
    coefficients = torch.randn(size, generator=generator)
    return coefficients * (coefficients.square().sum(2, keepdim=True) / 2).rsqrt()


def _drawn(chosen: Tensor, waveforms: Tensor, band: range, generator: torch.Generator) -> Tensor:
    """One sequence for each row of ``chosen (N, C)``, the numbers of its channels' waveforms."""
    N = len(chosen)

    def uniform(*size: int) -> Tensor:
        return torch.rand(N, *size, generator=generator)

    time = torch.arange(STEPS) / STEPS + uniform(1)
    time = time + 0.03 * uniform(1) * torch.sin(2 * math.pi * (time + uniform(1)))
    angles = 2 * math.pi * time[:, :, None] * torch.tensor(band)
    basis = torch.cat([angles.cos(), angles.sin()], 2)  # (N, T, 2 K)
    coefficients = waveforms[torch.arange(CHANNELS), chosen]  # (N, C, 2 K)
    amplitudes = torch.exp(0.3 * torch.randn(N, CHANNELS, 1, generator=generator))
    clean = amplitudes * (coefficients @ basis.mT)
    return clean + _NOISE * torch.randn(N, CHANNELS, STEPS, generator=generator)
