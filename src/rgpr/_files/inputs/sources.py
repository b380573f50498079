"""What a form of data has to give: its rows in batches, from any batch on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Piece", "Reading", "Source", "refuse_image_options"]


@dataclass(frozen=True)
class Reading:
    """How data are read.

    Attributes:
        target: The column or the key of the targets; several with commas between them.
        columns: The columns or the key of the inputs; ``None`` for the usual ones.
        batch_size: Rows of a batch.
        dtype: Of inputs that are floating point.
        classes: Names of the folders of classes in the order of their labels; ``None`` sorts them.
        size: Height and width that images are resized to; ``None`` leaves them as they are.
        channels: 1 or 3 for images; ``None`` for those of the first image.
        mean: Subtracted from each channel, after images were scaled to [0, 1].
        std: Each channel is divided by it.
        on_error: What to do with an image that cannot be read: ``"stop"`` or ``"skip"``.
        preprocess: Applied to the inputs of every batch.
        divide: What the inputs are divided by, before that; 255 makes bytes numbers in [0, 1].
        option: How the path was given, for errors, such as ``--val``.
    """

    target: str | None = None
    columns: tuple[str, ...] | None = None
    batch_size: int = 256
    dtype: torch.dtype = torch.float32
    classes: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    on_error: str = "stop"
    preprocess: Callable[[Tensor], Tensor] | None = None
    divide: float | None = None
    option: str | None = None


@dataclass(frozen=True)
class Piece:
    """One batch.

    Attributes:
        x: Inputs ``(B, ...)``.
        y: Targets, where there are any.
        names: Where each row comes from, if rows have files of their own.
        skipped: What could not be read, with the reason.
    """

    x: Tensor
    y: Tensor | None = None
    names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()


class Source(ABC):
    """One form of data.

    Attributes:
        about: What is read, in one sentence.
        columns: Names of the input's columns, of a table.
        classes: Names of the classes, of image folders.
        labelled: Whether there are targets.
    """

    about: str
    columns: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    labelled: bool = False

    @abstractmethod
    def rows(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def pieces(self, batch_size: int, start: int) -> Iterator[Piece]:
        """Batches from row ``start`` on, a multiple of the batch's size."""


def refuse_image_options(path: Path, reading: Reading) -> None:
    """Refuse what is meant for images where there are none."""
    options = ("classes", "size", "mean", "std")
    given = [name for name in options if getattr(reading, name) is not None]
    if given:
        raise ValueError(
            f"--{given[0]} is for image folders, and {path} is none; prepare the inputs before, or "
            "by --preprocess"
        )
