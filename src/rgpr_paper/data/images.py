"""Images by the name of their set: three places are searched, and the first that has them is taken.

1. ``ROOT/NAME.npz`` with uint8 ``x_train, y_train, x_test, y_test``: images ``N x H x W`` or
   ``N x H x W x 3``, labels ``N``. A set that is only ever an outlier needs no training part. An
   entry ``note`` says what the images really are, where that is not what the name says.
2. The published files, see :mod:`rgpr_paper.data.sources`.
3. The ``.npz`` file of a stand-in, where the set has one. Every result that uses it says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .image_set import ImageSet, channels_first
from .missing import MissingDataError
from .sources import SOURCES, Source

__all__ = ["read_images"]


def read_images(
    root: Path | None, name: str, part: str = "test", *, download: bool = False
) -> ImageSet:
    """One part of a set of images, in uint8.

    Args:
        root: The folder of data sets, or ``None`` if the user named none.
        name: Key of the set, such as ``"cifar10"``. A name that is not known here is looked for as
            ``ROOT/NAME.npz``.
        part: The part to read, ``"train"`` or ``"test"``.
        download: Let torchvision download the set into the folder if it is not there.

    Raises:
        MissingDataError: The set is not there; the message says where it was looked for and how to
            get it.
        ValueError: A file lacks this part, or holds something else than images.
    """
    source = SOURCES.get(name, Source(name))
    what, remedy = f"{source.name} ({part})", _remedy(name, source)
    if root is None:
        filled = "With --download it is filled." if source.published else remedy
        raise MissingDataError.no_folder(what, filled)
    root = Path(root)
    own = root / f"{name}.npz"
    if own.is_file():
        note, images = _read_npz(own, part)
        if images is not None:
            return ImageSet(source.name, *images, note=note or source.note)
    if source.published is not None:
        published = source.published(root, part, download)
        if published is not None:
            return ImageSet(source.name, *published)
    if source.stand_in is not None and (root / f"{source.stand_in}.npz").is_file():
        found = read_images(root, source.stand_in, part)
        note = f"{found.note or found.name}, in place of {source.name}"
        return replace(found, name=source.name, note=note)
    where = ", ".join(filter(None, [f"{own} with x_{part} and y_{part}", source.places]))
    raise MissingDataError(what, where, remedy)


def _remedy(name: str, source: Source) -> str:
    """The sentence that tells a user how to get the set."""
    if source.remedy:
        return source.remedy
    if source.published:
        return f"Run the same with --download, or put {name}.npz into the folder of --data."
    return f"Put {name}.npz into the folder of --data."


def _read_npz(path: Path, part: str) -> tuple[str, tuple[Tensor, Tensor] | None]:
    """The file's note, and images and labels, or ``None`` if the file has no such part."""
    with np.load(path) as file:
        note = str(file["note"]) if "note" in file.files else ""
        if f"x_{part}" not in file.files:
            return note, None
        if f"y_{part}" not in file.files:
            raise ValueError(f"{path} has x_{part} and no y_{part}; it holds {file.files}")
        x, y = torch.from_numpy(file[f"x_{part}"]), torch.from_numpy(file[f"y_{part}"])
    if x.dtype != torch.uint8 or not (x.dim() == 3 or (x.dim() == 4 and x.shape[3] == 3)):
        raise ValueError(
            f"x_{part} of {path} is {x.dtype} of shape {tuple(x.shape)}; expected uint8 images "
            "N x H x W or N x H x W x 3"
        )
    if y.numel() != len(x):
        raise ValueError(f"{path} has {len(x)} images and {y.numel()} labels in '{part}'")
    return note, (channels_first(x), y.reshape(-1).long())
