"""The sets in the roles that the paper gives them: trained and tested on, or outliers to those."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from .image_set import ImageSet, grey, some, three_channels
from .images import read_images
from .outliers import OutlierSource, read_kinds, uniform_noise

__all__ = ["IN_DISTRIBUTION", "digits", "read_outliers", "read_split"]

_COLOUR = {
    "SVHN": OutlierSource("svhn"),
    "LSUN": OutlierSource("lsun"),
    "CIFAR10": OutlierSource("cifar10"),
    "CIFAR100": OutlierSource("cifar100"),
    "FMNIST3D": OutlierSource("fashion_mnist", change=three_channels),
}

# For each in-distribution set the paper's sets of outliers, by the names of its tables. Uniform
# noise is added to each of them.
IN_DISTRIBUTION: dict[str, dict[str, OutlierSource]] = {
    "mnist": {
        "EMNIST": OutlierSource("emnist_letters"),
        "KMNIST": OutlierSource("kmnist"),
        "FMNIST": OutlierSource("fashion_mnist"),
        "GrayCIFAR10": OutlierSource("cifar10", change=grey),
    },
    "cifar10": {k: _COLOUR[k] for k in ("SVHN", "LSUN", "CIFAR100", "FMNIST3D")},
    "svhn": {k: _COLOUR[k] for k in ("CIFAR10", "LSUN", "CIFAR100", "FMNIST3D")},
    "cifar100": {k: _COLOUR[k] for k in ("SVHN", "LSUN", "CIFAR10", "FMNIST3D")},
    "digits": {
        "inverted": OutlierSource("", change=lambda x: 255 - x),
        "mirrored": OutlierSource("", change=lambda x: x.flip(3)),
    },
}


def digits() -> tuple[ImageSet, ImageSet]:
    """scikit-learn's digits for training and for testing.

    Each pixel becomes a square of four, because a LeNet needs images of 16 x 16 or larger.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16 * 255, dtype=torch.uint8).reshape(-1, 1, 8, 8)
    x = some(x.repeat_interleave(2, 2).repeat_interleave(2, 3), len(x), 0)
    y = some(torch.tensor(labels).long(), len(x), 0)
    cut = int(0.7 * len(x))
    note = "scikit-learn's digits, in place of a set of images"
    return ImageSet("digits", x[:cut], y[:cut], note), ImageSet("digits", x[cut:], y[cut:], note)


@lru_cache(maxsize=4)
def read_split(
    root: Path | None, name: str, device: str = "cpu", download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """The training and the test part of an in-distribution set.

    The last four sets are kept in memory, because every method of an experiment asks for them.

    Args:
        root: The folder of data sets, or ``None`` if the user named none.
        name: One of ``IN_DISTRIBUTION``.
        device: The device that the images are moved to.
        download: Let torchvision download the set if it is not there.

    Raises:
        MissingDataError: One of the parts is not there.
        ValueError: No experiment has this set.
    """
    if name not in IN_DISTRIBUTION:
        raise ValueError(f"no in-distribution set '{name}'; there are {', '.join(IN_DISTRIBUTION)}")
    if name == "digits":
        parts = digits()
    else:
        parts = (
            read_images(root, name, "train", download=download),
            read_images(root, name, "test", download=download),
        )
    train, test = (replace(part, x=part.x.to(device), y=part.y.to(device)) for part in parts)
    return train, test


def read_outliers(
    root: Path | None, name: str, device: str = "cpu", download: bool = False
) -> tuple[dict[str, ImageSet], dict[str, str]]:
    """The test outliers of an in-distribution set, at most 5000 of each kind, on the device.

    Args:
        root: The folder of data sets, or ``None`` if the user named none.
        name: One of ``IN_DISTRIBUTION``.
        device: The device that the images are moved to.
        download: Let torchvision download the sets that are not there.

    Returns:
        The outliers that are there, by the paper's names, and for each of the others a sentence
        that says how to get it.
    """
    _, test = read_split(root, name, device, download)
    found, missing = read_kinds(root, IN_DISTRIBUTION[name], test, download=download)
    found["UniformNoise"] = uniform_noise(test)
    return found, missing
