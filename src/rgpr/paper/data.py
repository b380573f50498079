"""Images for the experiments, from a folder that the user names.

The folder holds ``NAME.npz`` with uint8 ``x_train, y_train, x_test, y_test``: images ``N x H x W``
or ``N x H x W x 3``, labels ``N``. A set that is only ever an outlier needs no training part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Images", "Loader", "digits", "grey", "read_images", "some", "three_channels"]

Images = tuple[Tensor, Tensor]


class Loader:
    """Batches of images that stay on their device; uint8 is divided by 255, a batch at a time.

    Args:
        x: ``(N, C, H, W)``.
        y: Labels; without them it yields images alone.
        size: Of a batch.
    """

    def __init__(self, x: Tensor, y: Tensor | None = None, size: int = 1000) -> None:
        self.x, self.y, self.size = x, y, size
        self.dataset = range(len(x))  # laplace-torch asks for its length

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            x = self.x[rows]
            x = x.float() / 255 if x.dtype == torch.uint8 else x
            yield x if self.y is None else (x, self.y[rows])


def read_images(root: Path | None, name: str, part: str = "test") -> Images:
    """One part of a data set: images ``(N, C, H, W)`` in uint8, labels ``(N,)`` in int64.

    Args:
        root: The folder; ``None`` if the user named none.
        name: Of the set, such as ``"cifar10"``.
        part: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: The set is not there; says where it is expected.
        ValueError: The file lacks this part, or holds something else than images.
    """
    if root is None:
        raise FileNotFoundError(
            f"this experiment reads the images '{name}': name the folder that holds {name}.npz, "
            "with --data ROOT"
        )
    path = Path(root) / f"{name}.npz"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.npz"))) or "no .npz at all"
        raise FileNotFoundError(
            f"the images '{name}' are missing: expected {path} with uint8 x_{part} and y_{part}; "
            f"in that folder there is {there}"
        )
    with np.load(path) as file:
        missing = [key for key in (f"x_{part}", f"y_{part}") if key not in file.files]
        if missing:
            raise ValueError(f"{path} has no {' and no '.join(missing)}; it holds {file.files}")
        x, y = torch.from_numpy(file[f"x_{part}"]), torch.from_numpy(file[f"y_{part}"])
    if x.dtype != torch.uint8 or not (x.dim() == 3 or (x.dim() == 4 and x.shape[3] == 3)):
        raise ValueError(
            f"x_{part} of {path} is {x.dtype} of shape {tuple(x.shape)}; expected uint8 images "
            "N x H x W or N x H x W x 3"
        )
    if y.numel() != len(x):
        raise ValueError(f"{path} has {len(x)} images and {y.numel()} labels in '{part}'")
    x = x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return x.contiguous(), y.reshape(-1).long()


def digits() -> tuple[Images, Images]:
    """scikit-learn's digits for training and testing, each pixel made four: 16 x 16 images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16 * 255, dtype=torch.uint8).reshape(-1, 1, 8, 8)
    x = some(x.repeat_interleave(2, 2).repeat_interleave(2, 3), len(x), 0)
    y = some(torch.tensor(labels).long(), len(x), 0)
    cut = int(0.7 * len(x))
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def some(x: Tensor, count: int, seed: int) -> Tensor:
    """So many rows, or all if there are fewer, in random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[:count].to(x.device)]


def grey(x: Tensor) -> Tensor:
    """Colour images of 32 x 32 as grey ones of 28 x 28, in [0, 1]."""
    means = x.float().mean(1, keepdim=True) / 255
    return F.interpolate(means, size=(28, 28), mode="bilinear", antialias=True).clamp(0, 1)


def three_channels(x: Tensor) -> Tensor:
    """Grey images of 28 x 28 as colour images of 32 x 32, with a black margin."""
    return F.pad(x, (2, 2, 2, 2)).repeat(1, 3, 1, 1)
