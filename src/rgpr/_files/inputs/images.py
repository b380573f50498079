"""Folders of images: a folder for each class, or images alone; one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._images import ENDINGS, UnreadableError, opened
from ..._text import listed
from .sources import Piece, Reading, Source

__all__ = ["Images", "image_files"]

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")
# Whole numbers of more than 8 bits: PNG files have 16 at the most.
_DEEP = ("I", "I;16", "I;16B", "I;16L")


@dataclass(frozen=True)
class _Form:
    """What all images have in common: channels and, unless they are resized, a size."""

    channels: int
    size: tuple[int, int]
    first: Path


class Images(Source):
    """Images by the sorted names of their classes and files, as ``(B, C, H, W)`` in [0, 1]."""

    def __init__(self, path: Path, reading: Reading) -> None:
        if reading.columns is not None or reading.target is not None:
            raise ValueError(
                f"{path} is a folder of images, which has no columns: leave out --columns and "
                "--target; labels come from the names of its folders"
            )
        if reading.divide is not None:
            raise ValueError(
                f"{path} is a folder of images, which are read as numbers between 0 and 1: leave "
                "out --divide; --mean and --std normalise them"
            )
        self.path, self._reading = path, reading
        folders = _folders(path)
        names = [folder.name for folder in folders]
        classes = list(reading.classes or names)
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise ValueError(
                f"{path} has folders that are not among --classes {listed(classes)}: "
                f"{listed(unknown)}; rename or remove them, or name all classes"
            )
        numbered = [(classes.index(folder.name), folder) for folder in folders]
        inside = [(label, file) for label, folder in numbered for file in _images(folder)]
        flat = _images(path)
        if inside and flat:
            raise ValueError(
                f"{path} holds images ({flat[0].name}) beside folders of classes "
                f"({folders[0].name}); move them into the folder of their class"
            )
        self._files = [file for _, file in inside] or flat
        self._labels = [label for label, _ in inside]
        if not self._files:
            raise ValueError(
                f"{path} holds no image ({', '.join(ENDINGS)}), neither itself nor in folders of "
                "classes"
            )
        self.labelled = bool(inside)
        self.classes = tuple(classes) if inside else None
        kinds = f"of {len(folders)} classes" if inside else "without labels"
        self.about = f"{path}: {len(self._files)} images {kinds}"
        self._form: _Form | None = None

    def rows(self) -> int:
        return len(self._files)

    @property
    def files(self) -> list[Path]:
        """Every image, in the order of the rows."""
        return self._files

    def pieces(self, batch_size: int, start: int) -> Iterator[Piece]:
        if self._form is None and start:  # what the first image says holds for a run that goes on
            next(self.pieces(batch_size, 0), None)
        for first in range(start, len(self._files), batch_size):
            found: list[tuple[int, Tensor]] = []
            skipped: list[str] = []
            for row in range(first, min(first + batch_size, len(self._files))):
                try:
                    found.append((row, self._image(self._files[row])))
                except UnreadableError as error:
                    if self._reading.on_error == "stop":
                        raise ValueError(
                            f"{error}; mend or remove it, or pass --on-error skip"
                        ) from error
                    skipped.append(str(error))
            rows = [row for row, _ in found]
            names = tuple(self._files[row].relative_to(self.path).as_posix() for row in rows)
            y = torch.tensor([self._labels[row] for row in rows]) if self.labelled else None
            x = torch.stack([image for _, image in found]) if found else torch.empty(0)
            yield Piece(x, y, names, tuple(skipped))

    def _image(self, path: Path) -> Tensor:
        from PIL import Image

        image = opened(path)
        grey = image.mode in _GREY
        if self._form is None:
            channels = self._reading.channels or (1 if grey else 3)
            self._form = _Form(channels, (image.height, image.width), path)
        if not grey and self._form.channels == 1 and self._reading.channels is None:
            raise ValueError(
                f"{path} has colours and {self._form.first} is grey; pass --channels 3 or 1"
            )
        size = self._reading.size
        if size is not None and (image.height, image.width) != size:
            image = _mixable(image).resize((size[1], size[0]), Image.Resampling.BILINEAR)
        elif size is None and (image.height, image.width) != self._form.size:
            here, there = (image.height, image.width), self._form.size
            raise ValueError(
                f"{path} is {here[0]} x {here[1]} and {self._form.first} is {there[0]} x "
                f"{there[1]}; pass --size {there[0]}x{there[1]} to resize all"
            )
        return self._scaled(image, self._form.channels)

    def _scaled(self, image: Any, channels: int) -> Tensor:
        if image.mode in _DEEP:
            array = np.asarray(image).astype(np.float64)[..., None] / 65535
            array = np.repeat(array, channels, axis=2).astype(np.float32)
        else:
            array = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.float32)
            array = array.reshape(image.height, image.width, channels) / np.float32(255)
        pixels = torch.from_numpy(array).movedim(2, 0).contiguous()
        for name in ("mean", "std"):
            given = getattr(self._reading, name)
            if given is None:
                continue
            if len(given) not in (1, channels):
                raise ValueError(
                    f"--{name} has {len(given)} numbers, and the images of {self.path} "
                    f"{channels} channels; give one number, or one for each"
                )
            values = torch.tensor(given).reshape(-1, 1, 1)
            pixels = pixels - values if name == "mean" else pixels / values
        return pixels


def _mixable(image: Any) -> Any:
    """The image with pixels that can be averaged, which numbers of colours and bits cannot be."""
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("P", "PA"):
        clear = image.mode == "PA" or "transparency" in image.info
        return image.convert("RGBA" if clear else "RGB")
    return image


def _shown(path: Path) -> bool:
    """Whether it is meant to be seen; what a run of ours left unfinished is not."""
    return not path.name.startswith(".") and path.suffix != ".parts"


def image_files(path: Path) -> list[Path]:
    """Every image that is read of a folder, in it and in its folders of classes."""
    return [file for folder in (path, *_folders(path)) for file in _images(folder)]


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and _shown(entry))


def _images(folder: Path) -> list[Path]:
    """The images of a folder, also links to nothing, which turn out to be unreadable."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix.lower() in ENDINGS
        and (entry.is_file() or not entry.exists())
        and _shown(entry)
    )
