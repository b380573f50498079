"""Outliers: images of another set, changed so that they fit the network, and uniform noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rgpr import noise

from .image_set import ImageSet, some
from .images import read_images
from .missing import MissingDataError

__all__ = ["MOST_OUTLIERS", "OutlierSource", "read_kinds", "same", "uniform_noise"]

# Sets of outliers have at most this many images, so that no method takes hours to predict them.
MOST_OUTLIERS = 5000


def same(x: Tensor) -> Tensor:
    """The images as they are."""
    return x


@dataclass(frozen=True)
class OutlierSource:
    """Where a kind of outliers comes from.

    Attributes:
        name: Key of the set of images; an empty name stands for the in-distribution test images.
        part: The part of that set, ``"train"`` or ``"test"``.
        change: Makes the images fit the network, or makes outliers of the test images.
    """

    name: str
    part: str = "test"
    change: Callable[[Tensor], Tensor] = same


def read_kinds(
    root: Path | None,
    kinds: Mapping[str, OutlierSource],
    test: ImageSet,
    *,
    download: bool = False,
) -> tuple[dict[str, ImageSet], dict[str, str]]:
    """Outliers of several kinds, at most 5000 of each, on the device of the test images.

    Args:
        root: The folder of data sets, or ``None`` if the user named none.
        kinds: The kinds by the paper's names.
        test: Test images of the in-distribution set.
        download: Let torchvision download the sets that are not there.

    Returns:
        The kinds that are there by name, and for each of the others a sentence that says how to
        get it.
    """
    device = test.x.device
    found: dict[str, ImageSet] = {}
    missing: dict[str, str] = {}
    for kind, source in kinds.items():
        images = test
        if source.name:
            try:
                images = read_images(root, source.name, source.part, download=download)
            except MissingDataError as gap:
                missing[kind] = gap.remedy
                continue
        # Changed test images need no note: they are outliers of a kind, not a stand-in for a set.
        note = images.note if source.name else ""
        x = source.change(some(images.x, MOST_OUTLIERS, 0)).to(device)
        found[kind] = ImageSet(kind, x, some(images.y, MOST_OUTLIERS, 0).to(device), note)
    return found, missing


def uniform_noise(test: ImageSet) -> ImageSet:
    """As much uniform noise in [0, 1] as there are test images, at most 5000."""
    like = some(test.x, MOST_OUTLIERS, 0).float()
    uniform = noise.uniform(like, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(len(uniform), dtype=torch.long, device=test.x.device)
    return ImageSet("UniformNoise", uniform, labels)
