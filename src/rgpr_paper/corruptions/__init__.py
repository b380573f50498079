"""Nineteen ways to spoil a colour photograph, in five severities each, made in batches.

Kinds and names are those of CIFAR-10-C (Hendrycks and Dietterich, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations", ICLR 2019). The images are made by this
folder: they are not the published ones, and a result on them must say so.

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

Each family of kinds is a file, with its settings at the end; ``pixels.py`` has what they share.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Generator, Tensor

from . import blur, digital, light, noise, weather
from .family import Family

__all__ = ["KINDS", "SEVERITIES", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 500  # images at a time: they stay in the cache of a CPU, and memory stays small
CORRUPTIONS: Family = {
    **noise.CORRUPTIONS,
    **blur.CORRUPTIONS,
    **weather.CORRUPTIONS,
    **light.CORRUPTIONS,
    **digital.CORRUPTIONS,
}
KINDS = tuple(CORRUPTIONS)


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Spoilt copies of images.

    Args:
        images: ``(N, 3, H, W)`` in uint8, on any device, 8 x 8 or larger; the settings are meant
            for 32 x 32.
        kind: One of :data:`KINDS`.
        severity: From 1, the weakest, to 5.
        seed: Seed of the random numbers. Another kind draws other numbers; the severities of a
            kind start from the same ones.

    Returns:
        New images, of the same shape, type and device.

    Raises:
        ValueError: There is no such kind or severity, or these are not colour images in uint8.
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"no corruption '{kind}'; there are {', '.join(KINDS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity!r} of '{kind}': expected a whole number from 1 to 5")
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3 or min(shape[2:]) < 8:
        raise ValueError(
            f"cannot corrupt {images.dtype} of shape {shape}; expected uint8 images (N, 3, H, W), "
            "8 x 8 or larger; grey ones need their channel three times"
        )
    spoil, settings = CORRUPTIONS[kind]
    setting = settings[int(severity) - 1]
    generator = Generator().manual_seed(crc32(f"{kind} {seed}".encode()))
    result = torch.empty_like(images)
    for start in range(0, len(images), CHUNK):
        rows = slice(start, start + CHUNK)
        spoilt = spoil(images[rows].float() / 255, generator, *setting)
        result[rows] = (spoilt * 255).round().clamp(0, 255).byte()
    return result
