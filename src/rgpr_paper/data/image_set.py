"""Images with labels, batches of them, and the changes by which one set fits another's network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ImageSet", "Loader", "channels_first", "grey", "notes_of", "some", "three_channels"]


@dataclass(frozen=True)
class ImageSet:
    """Images ``(N, C, H, W)``, or sequences ``(N, C, T)``, and labels ``(N,)``.

    Attributes:
        name: The name that the paper's tables have for the set.
        x: Images in uint8, or in floating point between 0 and 1; sequences in floating point.
        y: Labels in int64.
        note: For a stand-in, a sentence about what the images really are; otherwise empty.
    """

    name: str
    x: Tensor
    y: Tensor
    note: str = ""


def notes_of(sets: Mapping[str, ImageSet]) -> dict[str, str]:
    """The notes of those sets that are stand-ins, by name."""
    return {name: images.note for name, images in sets.items() if images.note}


class Loader:
    """Batches of images that stay on their device.

    Images in uint8 are divided by 255 one batch at a time, because the whole set in floating point
    would take four times the memory.

    Args:
        x: Images ``(N, C, H, W)``.
        y: Labels ``(N,)``. Without labels the loader yields images alone.
        size: Number of images in a batch.
    """

    def __init__(self, x: Tensor, y: Tensor | None = None, size: int = 1000) -> None:
        self.x, self.y, self.size = x, y, size
        self.dataset = range(len(x))  # laplace-torch asks for the length of this attribute

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            x = self.x[rows]
            x = x.float() / 255 if x.dtype == torch.uint8 else x
            yield x if self.y is None else (x, self.y[rows])


def some(x: Tensor, count: int, seed: int) -> Tensor:
    """At most ``count`` rows of ``x``, drawn without replacement, in random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[:count].to(x.device)]


def channels_first(x: Tensor) -> Tensor:
    """Images ``N x H x W`` or ``N x H x W x 3`` as ``(N, C, H, W)``."""
    return (x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)).contiguous()


def grey(x: Tensor) -> Tensor:
    """Colour images of 32 x 32 as grey images of 28 x 28, with values between 0 and 1."""
    means = x.float().mean(1, keepdim=True) / 255
    return F.interpolate(means, size=(28, 28), mode="bilinear", antialias=True).clamp(0, 1)


def three_channels(x: Tensor) -> Tensor:
    """Grey images of 28 x 28 as colour images of 32 x 32 with a black margin."""
    return F.pad(x, (2, 2, 2, 2)).repeat(1, 3, 1, 1)
