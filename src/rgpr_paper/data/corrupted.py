"""CIFAR-10-C, from the published folder of ``.npy`` files.

The command that gets them compares the archive with the md5 that Zenodo gives for it. The files
themselves have no published hashes; they are read without pickle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .image_set import ImageSet, channels_first
from .missing import MissingDataError

__all__ = ["GET_CIFAR_10_C", "read_corrupted"]

GET_CIFAR_10_C = (
    "curl -LO https://zenodo.org/records/2535967/files/CIFAR-10-C.tar && "
    "echo '56bf5dcef84df0e2308c6dcbcbbd8499  CIFAR-10-C.tar' | md5sum --check && "
    "tar -xf CIFAR-10-C.tar -C ROOT"
)
_REMEDY = f"Get it by `{GET_CIFAR_10_C}`."


def read_corrupted(root: Path | None, corruption: str, severity: int) -> ImageSet:
    """The 10000 test images of CIFAR-10 under one corruption.

    Args:
        root: The folder that holds ``CIFAR-10-C``, or ``None`` if the user named none.
        corruption: Name of the corruption and of its file, such as ``"gaussian_noise"``.
        severity: A whole number from 1, the weakest, to 5.

    Raises:
        MissingDataError: The files are not there.
        ValueError: There is no such severity.
    """
    if not 1 <= severity <= 5:
        raise ValueError(f"severity = {severity}; CIFAR-10-C has 1 to 5")
    what = f"CIFAR-10-C ({corruption})"
    if root is None:
        raise MissingDataError.no_folder(what, _REMEDY)
    folder = Path(root) / "CIFAR-10-C"
    images, labels = folder / f"{corruption}.npy", folder / "labels.npy"
    if not (images.is_file() and labels.is_file()):
        raise MissingDataError(what, f"{images} and {labels}", _REMEDY)
    # A file has the five severities one after the other.
    rows = slice((severity - 1) * 10_000, severity * 10_000)
    x = torch.from_numpy(np.load(images, mmap_mode="r")[rows].copy())
    y = torch.from_numpy(np.load(labels)[rows].astype(np.int64))
    return ImageSet(f"CIFAR-10-C, {corruption} {severity}", channels_first(x), y)
