from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import string
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rgpr_paper.data import (
    IN_DISTRIBUTION,
    Loader,
    MissingDataError,
    digits,
    grey,
    read_corrupted,
    read_images,
    read_outliers,
    read_regression,
    read_split,
    some,
    three_channels,
)


def _made(root: Path, name: str, shape: tuple[int, ...], **counts: int) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (counts or {"test": 40}).items():
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 10, count, dtype=np.uint8)
    np.savez(root / f"{name}.npz", **arrays)


def test_our_own_form(tmp_path: Path) -> None:
    _made(tmp_path, "colour", (5, 6, 3))
    images = read_images(tmp_path, "colour")
    with np.load(tmp_path / "colour.npz") as file:
        assert torch.equal(images.x, torch.from_numpy(file["x_test"]).permute(0, 3, 1, 2))
        assert images.y.tolist() == file["y_test"].tolist()
    with pytest.raises(MissingDataError, match=r"with x_train and y_train"):
        read_images(tmp_path, "colour", "train")
    pixels, labels = np.zeros((3, 4, 4), np.float32), np.zeros(3)
    np.savez(tmp_path / "wrong.npz", x_test=pixels, y_test=labels)
    with pytest.raises(ValueError, match="expected uint8 images"):
        read_images(tmp_path, "wrong")
    np.savez(tmp_path / "wrong.npz", x_test=pixels.astype(np.uint8), y_test=labels[:2])
    with pytest.raises(ValueError, match="3 images and 2 labels"):
        read_images(tmp_path, "wrong")
    np.savez(tmp_path / "wrong.npz", x_test=pixels.astype(np.uint8))
    with pytest.raises(ValueError, match="has x_test and no y_test"):
        read_images(tmp_path, "wrong")


def test_what_is_missing_is_named_with_what_gets_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"CIFAR10 \(test\).*--data ROOT.*--download"):
        read_images(None, "cifar10")
    with pytest.raises(MissingDataError, match="cifar-100-python") as caught:
        read_images(tmp_path, "cifar100", "train")
    assert str(tmp_path / "cifar100.npz") in str(caught.value)
    # What goes into files names no folder of this machine.
    assert str(tmp_path) not in caught.value.remedy
    assert "CIFAR100 (train) is missing" in caught.value.remedy
    with pytest.raises(MissingDataError, match=r"github\.com/fyu/lsun"):
        read_images(tmp_path, "lsun")
    with pytest.raises(MissingDataError, match="Imagenet32_train_npz"):
        read_images(tmp_path, "imagenet32", "train")


def _idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    """The format of MNIST's files: magic number, sizes, bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


class _Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_lsun_is_read_without_running_what_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's own reader unpickles a cache in the working directory, by this name."""
    import lmdb
    from PIL import Image

    folder = tmp_path / "test_lmdb"
    with lmdb.open(str(folder)) as made, made.begin(write=True) as writing:
        for number in range(3):
            file = io.BytesIO()
            Image.new("RGB", (60, 40), (100 * number, 0, 0)).save(file, "PNG")
            writing.put(f"{number}".encode(), file.getvalue())
    monkeypatch.chdir(tmp_path)
    name = "".join(c for c in str(folder) if c in string.ascii_letters)
    (tmp_path / f"_cache_{name}").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    images = read_images(tmp_path, "lsun")
    assert not (tmp_path / "ran").exists()
    assert images.x.shape == (3, 3, 32, 32)
    assert images.x[:, 0, 0, 0].tolist() == [0, 100, 200]
    assert not images.note


@pytest.mark.parametrize(
    ("name", "folder", "stem"),
    [
        ("mnist", "MNIST", "t10k"),
        ("fashion_mnist", "FashionMNIST", "t10k"),
        ("kmnist", "KMNIST", "t10k"),
        ("emnist_letters", "EMNIST", "emnist-letters-test"),
    ],
)
def test_torchvision_layouts(tmp_path: Path, name: str, folder: str, stem: str) -> None:
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 28, 28))
    labels = np.arange(1, 8)
    for part in (stem, stem.replace("t10k", "train").replace("-test", "-train")):
        _idx(raw / f"{part}-images-idx3-ubyte", pixels)
        _idx(raw / f"{part}-labels-idx1-ubyte", labels)
    images = read_images(tmp_path, name)
    expected = pixels.transpose(0, 2, 1) if name == "emnist_letters" else pixels
    assert np.array_equal(images.x[:, 0].numpy(), expected)
    assert images.y.tolist() == labels.tolist()
    assert images.note == ""


def _packed(path: Path) -> str:
    """Pack a file as it was published, in a ``.gz`` beside it; returns the md5."""
    archive = path.with_name(f"{path.name}.gz")
    archive.write_bytes(gzip.compress(path.read_bytes()))
    return hashlib.md5(archive.read_bytes()).hexdigest()


def _changed(path: Path) -> None:
    """Change the last byte, which is a pixel or a label, and the time."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("what", ["images-idx3-ubyte", "labels-idx1-ubyte"])
def test_unpacked_files_are_what_their_archives_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where the archives are still there, as torchvision leaves them."""
    from torchvision.datasets import KMNIST

    raw = tmp_path / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    published = []
    for part in ("train", "t10k"):
        _idx(raw / f"{part}-images-idx3-ubyte", np.zeros((7, 28, 28)))
        _idx(raw / f"{part}-labels-idx1-ubyte", np.arange(7))
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            name = f"{part}-{kind}"
            published.append((f"{name}.gz", _packed(raw / name)))
    monkeypatch.setattr(KMNIST, "resources", published)
    assert len(read_images(tmp_path, "kmnist").x) == 7
    file = raw / f"t10k-{what}"
    _changed(file)
    with pytest.raises(ValueError, match=rf"{what} is not what .*\.gz holds; .*--download"):
        read_images(tmp_path, "kmnist")
    assert len(read_images(tmp_path, "kmnist", "train").x) == 7  # which is another file
    _packed(file)  # an archive that fits, and is not the published one
    with pytest.raises(ValueError, match=rf"{what}\.gz has the md5 .* was published"):
        read_images(tmp_path, "kmnist")
    file.with_name(f"{file.name}.gz").unlink()  # nothing is left to compare with
    assert len(read_images(tmp_path, "kmnist").x) == 7


def test_letters_are_what_their_archive_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMNIST is published as one archive of archives."""
    from torchvision.datasets import EMNIST

    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    archive, names = raw / "gzip.zip", ("images-idx3-ubyte", "labels-idx1-ubyte")
    _idx(raw / f"emnist-letters-test-{names[0]}", np.zeros((7, 28, 28)))
    _idx(raw / f"emnist-letters-test-{names[1]}", np.arange(1, 8))
    with zipfile.ZipFile(archive, "w") as made:
        for name in names:
            content = (raw / f"emnist-letters-test-{name}").read_bytes()
            made.writestr(f"gzip/emnist-letters-test-{name}.gz", gzip.compress(content))
    monkeypatch.setattr(EMNIST, "md5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert len(read_images(tmp_path, "emnist_letters").x) == 7
    _changed(raw / f"emnist-letters-test-{names[0]}")
    with pytest.raises(ValueError, match=r"images-idx3-ubyte is not what .*gzip\.zip holds"):
        read_images(tmp_path, "emnist_letters")
    _changed(archive)
    with pytest.raises(ValueError, match=r"gzip\.zip has the md5"):
        read_images(tmp_path, "emnist_letters")


def test_a_file_with_another_sum_is_not_read(tmp_path: Path) -> None:
    """CIFAR's published files are pickles: torchvision compares their sums first."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(gzip.compress(b"nothing"))
    with pytest.raises(MissingDataError, match="CIFAR10"):
        read_images(tmp_path, "cifar10")
    with pytest.raises(MissingDataError, match="SVHN"):
        read_images(tmp_path, "svhn")


def test_stand_ins_say_what_they_are(tmp_path: Path) -> None:
    _made(tmp_path, "letters_az_sample", (28, 28))
    _made(tmp_path, "scenes32", (32, 32, 3))
    _made(tmp_path, "tiny_imagenet32", (32, 32, 3), train=5)
    _made(tmp_path, "svhn", (32, 32, 3))
    letters = read_images(tmp_path, "emnist_letters")
    assert letters.name == "EMNIST"
    assert letters.note == "handwritten capitals A-Z, in place of EMNIST"
    assert "in place of LSUN" in read_images(tmp_path, "lsun").note
    natural = read_images(tmp_path, "imagenet32", "train")
    assert natural.note == "Tiny ImageNet, in place of ImageNet32"
    assert not read_images(tmp_path, "tiny_imagenet32", "train").note  # as itself it is no stand-in
    assert "re-cropped from the full-number release" in read_images(tmp_path, "svhn").note
    # The real thing goes first, and a file can say what it is.
    _made(tmp_path, "emnist_letters", (28, 28), test=3)
    assert read_images(tmp_path, "emnist_letters").note == ""
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "svhn.npz", x_test=pixels, y_test=np.zeros(2), note="the published one")
    assert read_images(tmp_path, "svhn").note == "the published one"


def test_published_batches_of_imagenet32(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet32"
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    np.savez(folder / "train_data_batch_1.npz", data=data, labels=np.array([1, 2, 3, 1000]))
    images = read_images(tmp_path, "imagenet32", "train")
    assert np.array_equal(images.x[2, 1].numpy().ravel(), data[2, 1024:2048])
    assert images.y.tolist() == [0, 1, 2, 999]


def test_cifar10_c(tmp_path: Path) -> None:
    with pytest.raises(
        MissingDataError, match=r"zenodo\.org/records/2535967.*\| md5sum --check &&"
    ):
        read_corrupted(tmp_path, "fog", 1)
    with pytest.raises(MissingDataError, match="--data ROOT"):
        read_corrupted(None, "fog", 1)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    severities = np.repeat(np.arange(1, 6, dtype=np.uint8), 10_000)
    np.save(folder / "fog.npy", np.broadcast_to(severities[:, None, None, None], (50_000, 2, 2, 3)))
    np.save(folder / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    images = read_corrupted(tmp_path, "fog", 4)
    assert images.x.shape == (10_000, 3, 2, 2)
    assert images.x.unique().tolist() == [4]
    assert images.y[:3].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="severity = 6"):
        read_corrupted(tmp_path, "fog", 6)


def test_regression_sets(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"curl .*uci/housing\.txt"):
        read_regression(tmp_path, "housing")
    with pytest.raises(MissingDataError, match="--data ROOT"):
        read_regression(None, "housing")
    (tmp_path / "uci").mkdir()
    path = tmp_path / "uci" / "housing.txt"
    path.write_text(" 1.5 \t2 3\n4 5  6 \n\n")
    x, y = read_regression(tmp_path, "housing")
    assert x.tolist() == [[1.5, 2.0], [4.0, 5.0]]
    assert y.tolist() == [[3.0], [6.0]]
    path.write_text("a b\n")
    with pytest.raises(ValueError, match="not a table of numbers"):
        read_regression(tmp_path, "housing")
    path.write_text("1\n2\n")
    with pytest.raises(ValueError, match="one column"):
        read_regression(tmp_path, "housing")


def test_every_role_fits_its_network(tmp_path: Path) -> None:
    for name in ("mnist", "fashion_mnist", "kmnist", "letters_az_sample"):
        _made(tmp_path, name, (28, 28), train=60, test=40)
    for name in ("cifar10", "svhn", "scenes32", "cifar100"):
        _made(tmp_path, name, (32, 32, 3), train=60, test=40)
    for name in ("mnist", "cifar10", "svhn", "cifar100"):
        shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
        train, test = read_split(tmp_path, name)
        assert train.x.shape == (60, *shape)
        assert test.x.shape == (40, *shape)
        outliers, missing = read_outliers(tmp_path, name)
        assert set(outliers) == {*IN_DISTRIBUTION[name], "UniformNoise"}
        assert missing == {}
        for images in outliers.values():
            batch = next(iter(Loader(images.x)))
            assert batch.shape == (40, *shape)
            assert batch.dtype == torch.float32
            assert 0 <= float(batch.min()) <= float(batch.max()) <= 1
    with pytest.raises(ValueError, match="no in-distribution set 'nothing'"):
        read_split(tmp_path, "nothing")


def test_missing_outliers_are_left_out_and_named(tmp_path: Path) -> None:
    _made(tmp_path, "cifar10", (32, 32, 3), train=60, test=40)
    _made(tmp_path, "fashion_mnist", (28, 28))
    outliers, missing = read_outliers(tmp_path, "cifar10")
    assert set(outliers) == {"FMNIST3D", "UniformNoise"}
    assert set(missing) == {"SVHN", "LSUN", "CIFAR100"}
    assert "--download" in missing["SVHN"]


def test_changed_images_are_the_same_images() -> None:
    x = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    coloured = three_channels(x)
    assert coloured.shape == (4, 3, 32, 32)
    assert torch.equal(coloured[:, 1, 2:-2, 2:-2], x[:, 0])
    assert coloured.float().sum() == 3 * x.float().sum()
    flat = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
    assert torch.allclose(grey(flat), torch.full((2, 1, 28, 28), 0.2))
    train, test = digits()
    assert train.x.shape[1:] == (1, 16, 16)
    assert torch.equal(train.x[:, :, ::2, ::2], train.x[:, :, 1::2, 1::2])
    assert len(train.x) + len(test.x) == 1797
    assert sorted(some(torch.arange(9), 20, 3).tolist()) == list(range(9))
    assert torch.equal(some(train.x, 5, 1), some(train.x, 5, 1))
    assert len(torch.unique(train.y)) == 10
