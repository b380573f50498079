"""Every set of images by name: its published files, its stand-in, and how a user gets it.

The published files are torchvision's layouts for MNIST, Fashion-MNIST, KMNIST, EMNIST, CIFAR-10,
CIFAR-100 and SVHN, test images of LSUN in an lmdb, and the ``.npz`` batches of ImageNet32 (``data``
of ``N x 3072``), not the pickled ones, because reading a pickle runs whatever code is in it. What
is compared with a published hash before a set is used:

- CIFAR-10, CIFAR-100 and SVHN: the md5 of every file, by torchvision, at every read. CIFAR's files
  are pickles, which nothing but this comparison keeps from running code.
- MNIST, Fashion-MNIST, KMNIST and EMNIST: the md5 of the archives, by torchvision while it
  downloads. At a read, the archives that are still there and what was unpacked from them, by
  :mod:`rgpr_paper.data.unpacked`; unpacked files alone have nothing to be compared with. They are
  numbers, and so are the ``processed/*.pt`` of an old torchvision, read with ``weights_only``.
- LSUN and ImageNet32: nothing, as there is no published hash that we could confirm. Pixels are read
  from them, without pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .image_set import channels_first
from .unpacked import check_unpacked

__all__ = ["SOURCES", "Source"]

# Reads one part from a folder, and downloads it if told to; ``None`` if the part is not there.
_Reader = Callable[[Path, str, bool], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Source:
    """Where a set of images comes from.

    Attributes:
        name: The name that the paper's tables have for the set.
        published: Reads the published files; ``None`` where there are none.
        places: The published files, for the message that they are missing.
        stand_in: Key of the set that is taken where this one is missing.
        note: What the images of the ``.npz`` form really are, where that is not what the name says.
        remedy: A sentence with the command that gets the set, where ``--download`` does not.
    """

    name: str
    published: _Reader | None = None
    places: str = ""
    stand_in: str | None = None
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class _Torchvision:
    """Reads a set of torchvision.

    Attributes:
        kind: Name of the class in ``torchvision.datasets``.
        options: Keywords for that class, beside the folder and the part.
        labels: The attribute of a loaded set that has the labels.
        named_parts: Whether the class takes the part by name (``split="test"``) and not by a flag
            (``train=False``).
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    labels: str = "targets"
    named_parts: bool = False

    def __call__(self, root: Path, part: str, download: bool) -> tuple[Tensor, Tensor] | None:
        try:
            dataset = getattr(import_module("torchvision.datasets"), self.kind)
        except ImportError:
            return None
        which = {"split": part} if self.named_parts else {"train": part == "train"}
        try:
            found = dataset(root, download=download, **which, **self.options)
        except (RuntimeError, OSError):  # the files are missing or damaged, or no server answers
            return None
        self.check(found, part)
        y = torch.as_tensor(getattr(found, self.labels)).long()
        return self.images(torch.as_tensor(found.data)), y

    def check(self, found: Any, part: str) -> None:
        """Refuse a loaded set whose files torchvision has not compared with their hashes."""

    def images(self, x: Tensor) -> Tensor:
        """The set's images as ``(N, C, H, W)``."""
        return channels_first(x)


class _Mnist(_Torchvision):
    """A set whose files torchvision unpacks from one ``.gz`` each."""

    def check(self, found: Any, part: str) -> None:
        start = "train" if part == "train" else "t10k"
        for name, md5 in found.resources:
            archive = Path(found.raw_folder) / name
            if name.startswith(start) and archive.with_suffix("").is_file():
                check_unpacked(archive.with_suffix(""), archive, md5)


class _Svhn(_Torchvision):
    def images(self, x: Tensor) -> Tensor:
        return x.contiguous()  # torchvision has put the channels first already


class _Emnist(_Torchvision):
    def check(self, found: Any, part: str) -> None:
        for file in (Path(found.images_file), Path(found.labels_file)):
            if file.is_file():
                check_unpacked(file, file.with_name("gzip.zip"), found.md5, f"gzip/{file.name}.gz")

    def images(self, x: Tensor) -> Tensor:
        return channels_first(x.mT)  # the published files have rows and columns exchanged


def _lsun(root: Path, part: str, download: bool) -> tuple[Tensor, Tensor] | None:
    """The 10000 test images of LSUN from its lmdb, their middle squares at 32 x 32.

    torchvision's reader is not used: it unpickles a list of keys from the working directory, and so
    would run code of whoever put such a file there.
    """
    if part != "test" or not (root / "test_lmdb").is_dir():
        return None
    try:
        lmdb, pillow = import_module("lmdb"), import_module("PIL.Image")
    except ImportError:
        return None
    squares = []
    with lmdb.open(str(root / "test_lmdb"), readonly=True, lock=False) as folder:
        for _, content in folder.begin().cursor():
            image = pillow.open(BytesIO(content))
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.crop((left, top, left + side, top + side)).convert("RGB")
            squares.append(torch.from_numpy(np.array(square.resize((32, 32)))))
    return channels_first(torch.stack(squares)), torch.zeros(len(squares), dtype=torch.long)


def _imagenet32(root: Path, part: str, download: bool) -> tuple[Tensor, Tensor] | None:
    """The test images, or the first of the ten training batches, which has enough outliers."""
    file_name = "train_data_batch_1.npz" if part == "train" else "val_data.npz"
    path = root / "imagenet32" / file_name
    if not path.is_file():
        return None
    with np.load(path) as file:
        x = torch.from_numpy(file["data"]).reshape(-1, 3, 32, 32)
        # Published labels count from one.
        y = torch.from_numpy(np.asarray(file["labels"])).reshape(-1).long() - 1
    return x, y


SOURCES = {
    "mnist": Source("MNIST", _Mnist("MNIST"), "MNIST/raw"),
    "fashion_mnist": Source("FMNIST", _Mnist("FashionMNIST"), "FashionMNIST/raw"),
    "kmnist": Source("KMNIST", _Mnist("KMNIST"), "KMNIST/raw"),
    "emnist_letters": Source(
        "EMNIST",
        _Emnist("EMNIST", {"split": "letters"}),
        "EMNIST/raw",
        stand_in="letters_az_sample",
    ),
    "letters_az_sample": Source("handwritten capitals A-Z"),
    "cifar10": Source("CIFAR10", _Torchvision("CIFAR10"), "cifar-10-batches-py"),
    "cifar100": Source("CIFAR100", _Torchvision("CIFAR100"), "cifar-100-python"),
    "svhn": Source(
        "SVHN",
        _Svhn("SVHN", labels="labels", named_parts=True),
        "test_32x32.mat and train_32x32.mat",
        note=(
            "re-cropped from the full-number release and stored lossy, not the published "
            "32 x 32 files"
        ),
    ),
    "lsun": Source(
        "LSUN",
        _lsun,
        "test_lmdb",
        stand_in="scenes32",
        remedy=(
            "Get test_lmdb by `python download.py -c test` of github.com/fyu/lsun into the folder "
            "of --data, and `pip install lmdb`. Nothing is published to compare the files with."
        ),
    ),
    "scenes32": Source("six kinds of outdoor scenes"),
    "imagenet32": Source(
        "ImageNet32",
        _imagenet32,
        "imagenet32/train_data_batch_1.npz and imagenet32/val_data.npz",
        stand_in="tiny_imagenet32",
        remedy=(
            "Get Imagenet32_train_npz.zip and Imagenet32_val_npz.zip from "
            "https://image-net.org/download-images and `unzip` both into ROOT/imagenet32. We could "
            "confirm no published hash to compare them with."
        ),
    ),
    "tiny_imagenet32": Source("Tiny ImageNet"),
}
