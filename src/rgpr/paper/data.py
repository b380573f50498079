"""Images for the experiments, from a folder that the user names.

The folder holds ``NAME.npz`` with uint8 ``x_train, y_train, x_test, y_test``: images ``N x H x W`` or
``N x H x W x 3``, labels ``N``. A set that is only ever an outlier needs no training part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["read_images"]


def read_images(root: Path | None, name: str, part: str = "test") -> tuple[Tensor, Tensor]:
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
