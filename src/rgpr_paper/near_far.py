"""Which outliers are near to an in-distribution set of images, and which are far from it.

Near outliers are natural images or characters like the data, far ones are of another kind.
"""

from __future__ import annotations

from .context import Context
from .data import (
    ImageSet,
    OutlierSource,
    grey,
    read_kinds,
    read_split,
    three_channels,
    uniform_noise,
)

__all__ = ["OUTLIERS", "near_and_far"]

_COLOUR = {
    "CIFAR10": OutlierSource("cifar10"),
    "CIFAR100": OutlierSource("cifar100"),
    "Tiny ImageNet": OutlierSource("tiny_imagenet32", "train"),
    "SVHN": OutlierSource("svhn"),
    "LSUN": OutlierSource("lsun"),
    "FMNIST3D": OutlierSource("fashion_mnist", change=three_channels),
    "MNIST3D": OutlierSource("mnist", change=three_channels),
}


def _colour(*names: str) -> dict[str, OutlierSource]:
    return {name: _COLOUR[name] for name in names}


# For each in-distribution set its near and far outliers; uniform noise is added to the far ones.
OUTLIERS: dict[str, dict[str, dict[str, OutlierSource]]] = {
    "mnist": {
        "near": {
            "EMNIST": OutlierSource("emnist_letters"),
            "KMNIST": OutlierSource("kmnist"),
            "notMNIST": OutlierSource("notmnist"),
        },
        "far": {
            "FMNIST": OutlierSource("fashion_mnist"),
            "GrayCIFAR10": OutlierSource("cifar10", change=grey),
        },
    },
    "cifar10": {
        "near": _colour("CIFAR100", "Tiny ImageNet"),
        "far": _colour("SVHN", "LSUN", "FMNIST3D", "MNIST3D"),
    },
    "cifar100": {
        "near": _colour("CIFAR10", "Tiny ImageNet"),
        "far": _colour("SVHN", "LSUN", "FMNIST3D", "MNIST3D"),
    },
    "svhn": {
        "near": _colour("CIFAR10", "CIFAR100", "Tiny ImageNet"),
        "far": _colour("LSUN", "FMNIST3D", "MNIST3D"),
    },
    "digits": {
        "near": {"mirrored": OutlierSource("", change=lambda x: x.flip(3))},
        "far": {"inverted": OutlierSource("", change=lambda x: 255 - x)},
    },
}


def near_and_far(
    context: Context, name: str
) -> tuple[dict[str, dict[str, ImageSet]], dict[str, str]]:
    """Near and far outliers, at most 5000 of a kind, and how to get those that are missing.

    Args:
        context: Where the data are.
        name: The in-distribution set.
    """
    _, test = read_split(context.data, name, context.device, context.download)
    found: dict[str, dict[str, ImageSet]] = {}
    missing: dict[str, str] = {}
    for where, kinds in OUTLIERS[name].items():
        found[where], gaps = read_kinds(context.data, kinds, test, download=context.download)
        missing |= gaps
    found["far"]["UniformNoise"] = uniform_noise(test)
    return found, missing
