"""Data from files: the same batches whatever the form, and errors that name what is wrong."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rgpr._files.inputs.data import Data, read


def both(data: Data) -> tuple[Tensor, Tensor | None]:
    """All inputs and all targets."""
    pieces = list(data.pieces())
    y = [piece.y for piece in pieces if piece.y is not None]
    return torch.cat([piece.x for piece in pieces]), torch.cat(y) if y else None


def picture(path: Path, pixels: Any, **how: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)


def colours(height: int = 4, width: int = 6, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, size=(height, width, 3), dtype=np.uint8)


# -- npz -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", ["x", "X", "images", "data"])
@pytest.mark.parametrize("y", ["y", "labels", "target", None])
def test_arrays(x: str, y: str | None, tmp_path: Path) -> None:
    values, labels = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10, dtype=np.int32)
    np.savez(tmp_path / "d.npz", **{x: values}, **({} if y is None else {y: labels}))
    data = read(tmp_path / "d.npz", batch_size=4)
    assert len(data) == 10
    assert f"inputs '{x}'" in data.about
    assert (f"targets '{y}'" if y else "no targets") in data.about
    for _ in range(2):  # it can be read again
        batches = list(data)
        assert [len(batch[0] if y else batch) for batch in batches] == [4, 4, 2]
    inputs, targets = both(data)
    assert inputs.dtype == torch.float32
    np.testing.assert_allclose(inputs.numpy(), values, rtol=1e-6)
    if y is not None:
        assert targets is not None
        assert targets.dtype == torch.int64
    assert read(tmp_path / "d.npz", dtype=torch.float64).batches()
    assert len(read(tmp_path / "d.npz", batch_size=4).batches()) == 3


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, a=np.zeros((3, 2)), w=np.array(["u", "v", "w"]), y=np.zeros(4))
    with pytest.raises(ValueError, match=r"d\.npz: it has the keys a, w, y and none of x, X, im"):
        read(path)
    with pytest.raises(ValueError, match="'a' has 3 rows and 'y' 4"):
        read(path, columns=("a",))
    with pytest.raises(ValueError, match="'w' holds <U1"):
        read(path, columns=("a",), target="w")
    with pytest.raises(ValueError, match=r"no key 'b' for the targets\. There are a, w, y"):
        read(path, columns=("a",), target="b")
    with pytest.raises(ValueError, match="--size is for image folders"):
        read(path, size=(2, 2))
    np.savez(path, x=np.array([{}, {}]))  # would be unpickled
    with pytest.raises(ValueError, match=r"d.npz is no .npz file, or holds Python objects"):
        read(path)
    path.write_bytes(b"no zip at all")
    with pytest.raises(ValueError, match=r"d.npz(: | is no)"):
        read(path)
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nothing"):
        read(tmp_path / "nothing")
    (tmp_path / "d.txt").touch()
    with pytest.raises(ValueError, match="none of the forms that are read"):
        read(tmp_path / "d.txt")
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        read(path, batch_size=0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays_are_named(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    save(path, x=np.arange(120.0).reshape(40, 3), y=np.arange(40))
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place])
        with pytest.raises(ValueError, match=r"d\.npz"):
            read(path)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:  # some bytes, such as those of the time, mean nothing
            read(path)
        except ValueError as error:
            assert "d.npz" in str(error)  # noqa: PT017


# -- tables ----------------------------------------------------------------------------------------


def written(path: Path, columns: dict[str, Any], **how: Any) -> Path:
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    table = pa.table(columns)
    if path.suffix == ".csv":
        pc.write_csv(table, path)
    else:
        pq.write_table(table, path, **how)
    return path


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables(ending: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {
        "b": random.normal(size=5000),
        "name": [f"row {i}" for i in range(5000)],
        "a": np.arange(5000),
        "c": random.random(5000) > 0.5,
        "label": np.arange(5000) % 7,
    }
    data = read(written(tmp_path / f"t.{ending}", columns), batch_size=64)
    assert data.columns == ("b", "a", "c")
    assert "not used: name" in data.about
    assert len(data) == 5000
    assert [len(piece.x) for piece in data.pieces()] == [64] * 78 + [8]
    x, y = both(data)
    expected = np.stack([columns[name] for name in ("b", "a", "c")], axis=1).astype(np.float32)
    np.testing.assert_array_equal(x.numpy(), expected)
    np.testing.assert_array_equal(y, columns["label"])
    rest = [piece.x for piece in data.pieces(start=64 * 30)]
    np.testing.assert_array_equal(torch.cat(rest).numpy(), expected[64 * 30 :])
    assert list(data.pieces(start=64 * 100)) == []
    other = read(tmp_path / f"t.{ending}", target="b", columns=("c", "a"))
    x, y = both(other)
    assert y is not None
    assert y.dtype == torch.float32
    np.testing.assert_array_equal(x.numpy(), expected[:, [2, 1]])
    two = both(read(tmp_path / f"t.{ending}", target="a,label"))[1]
    assert two is not None
    assert (two.shape, two.dtype) == ((5000, 2), torch.int64)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_missing_numbers_are_nan(ending: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"t.{ending}", {"a": [1.0, None, 3.0], "b": [1, 2, None]})
    x, y = both(read(path))
    assert y is None
    assert x.isnan().tolist() == [[False, False], [True, False], [False, True]]


def test_whole_numbers_that_become_decimal_late(tmp_path: Path) -> None:
    """pyarrow looks at the first megabyte of a csv file to say what a column is."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,2\n" * 400_000 + "1.5,2\n")
    x, _ = both(read(path, batch_size=1000))
    assert x.shape == (400_001, 2)
    assert x[-1].tolist() == [1.5, 2.0]
    with path.open("a") as file:
        file.write("word,2\n")
    with pytest.raises(ValueError, match=r"t.csv cannot be read: .*word"):
        both(read(path))


def test_targets_that_become_decimal_late(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1,2\n" * 400_000 + "1,2.5\n")
    pieces = list(read(path, batch_size=1000).pieces())
    assert [piece.y.dtype for piece in (pieces[0], pieces[-1])] == [torch.int64, torch.float32]
    assert pieces[-1].y.tolist() == [2.5]


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", {"a": [1.0, 2.0], "word": ["u", "v"]})
    with pytest.raises(ValueError, match=r"no column 'b'\. There are a, word"):
        read(path, target="b")
    with pytest.raises(ValueError, match=r"no numbers in 'word' \(string\)"):
        read(path, target="word")
    with pytest.raises(ValueError, match="no column of numbers is left"):
        read(path, target="a")
    with pytest.raises(ValueError, match="inputs and targets at once are a;"):
        read(path, target="a", columns=("a",))
    path.write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"t.parquet cannot be read"):
        read(path)
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    with pytest.raises(ValueError, match="these columns are there more than once: a"):
        read(tmp_path / "twice.csv")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_endings_in_capitals(ending: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"t.{ending}", {"a": [1.0, 2.0], "y": [0, 1]})
    data = read(path.rename(tmp_path / f"T.{ending.upper()}"))
    assert len(data) == 2
    assert both(data)[0].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("text", ["a;b\n1;2\n", "a;b\n1,5;2,5\n", '"a, b";"c"\n1;2\n'])
def test_semicolons(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=r"t.csv: its columns are separated by semicolons; save"):
        read(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text('"a;b",c\n1,2\n')
    assert read(tmp_path / "t.csv").columns == ("a;b", "c")


# -- images ----------------------------------------------------------------------------------------


def test_folders_of_classes(tmp_path: Path) -> None:
    for number, name in enumerate(["dog", "cat", "dog", "bird"]):
        picture(tmp_path / name / f"{number}.PNG", colours(seed=number))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "answers.csv.parts").mkdir()  # of a run whose output lies beside the images
    (tmp_path / "dog" / "notes.txt").touch()
    data = read(tmp_path, batch_size=3)
    assert data.classes == ("bird", "cat", "dog")
    assert len(data) == 4
    pieces = list(data.pieces())
    assert [piece.names for piece in pieces] == [
        ("bird/3.PNG", "cat/1.PNG", "dog/0.PNG"),
        ("dog/2.PNG",),
    ]
    x, y = both(data)
    assert y is not None
    assert y.tolist() == [0, 1, 2, 2]
    assert x.shape == (4, 3, 4, 6)
    expected = torch.from_numpy(colours(seed=3)).movedim(2, 0).float() / 255
    assert torch.equal(x[0], expected)
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    normal, _ = both(read(tmp_path, mean=mean, std=std))
    torch.testing.assert_close(
        normal[0], (expected - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    )
    small, _ = both(read(tmp_path, size=(2, 3), channels=1))
    assert small.shape == (4, 1, 2, 3)
    y = both(read(tmp_path, classes=("dog", "fox", "cat", "bird")))[1]
    assert y is not None
    assert sorted(y.tolist()) == [0, 0, 2, 3]
    with pytest.raises(ValueError, match=r"--mean has 2 numbers, and the images .* 3 channels"):
        both(read(tmp_path, mean=(0.1, 0.2)))
    with pytest.raises(ValueError, match="not among --classes cat, dog: bird"):
        read(tmp_path, classes=("cat", "dog"))
    with pytest.raises(ValueError, match="no columns"):
        read(tmp_path, target="y")


def test_images_alone_have_no_labels(tmp_path: Path) -> None:
    picture(tmp_path / "b.bmp", colours())
    picture(tmp_path / "a.webp", colours(), lossless=True)
    data = read(tmp_path)
    x, y = both(data)
    assert y is None
    assert data.classes is None
    assert torch.equal(x[0], x[1])
    (tmp_path / "class").mkdir()
    picture(tmp_path / "class" / "c.png", colours())
    with pytest.raises(ValueError, match=r"images \(a.webp\) beside folders of classes \(class\)"):
        read(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        read(tmp_path / "none")


@pytest.mark.parametrize("form", ["GIF", "TIFF", "ICO", "PCX", "JPEG2000"])
def test_an_ending_does_not_open_the_reader_of_another_format(form: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", colours(16, 16), format=form)
    with pytest.raises(ValueError, match=r"a.png cannot be read as an image .*mend or remove it"):
        both(read(tmp_path))


def test_grey_images(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", colours()[..., 0])
    deep = np.full((4, 6), 65535, np.uint16)
    picture(tmp_path / "b.png", deep)
    x, _ = both(read(tmp_path))
    assert x.shape == (2, 1, 4, 6)
    assert bool((x[1] == 1).all())
    assert both(read(tmp_path, channels=3))[0].shape == (2, 3, 4, 6)
    picture(tmp_path / "c.png", colours())
    with pytest.raises(ValueError, match=r"c.png has colours and .*a.png is grey; pass --channels"):
        both(read(tmp_path))


@pytest.mark.parametrize(("mode", "plain"), [("P", "RGB"), ("1", "L"), ("clear", "RGBA")])
def test_images_of_few_colours_are_resized_as_others(mode: str, plain: str, tmp_path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(colours(16, 24)).quantize(8)
    if mode == "1":
        image = image.convert("1")
    if mode == "clear":
        image.info["transparency"] = 3
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    image.save(tmp_path / "few" / "a.png")
    image.convert(plain).save(tmp_path / "many" / "a.png")
    for size in ((5, 7), (16, 24)):
        few, many = (both(read(tmp_path / name, size=size))[0] for name in ("few", "many"))
        assert torch.equal(few, many)


def test_a_resumed_pass_knows_the_first_image(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", colours())
    picture(tmp_path / "b.png", colours(5, 6))
    with pytest.raises(ValueError, match=r"b.png is 5 x 6 and .*a.png is 4 x 6; pass --size 4x6"):
        list(read(tmp_path, batch_size=1).pieces(start=1))


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    for name in "ab":
        picture(tmp_path / f"{name}.png", colours(40, 60))
    path = tmp_path / "a.png"
    path.write_bytes(path.read_bytes()[:600])  # cut short
    with pytest.raises(ValueError, match=r"a.png cannot be read .*--on-error skip"):
        both(read(tmp_path))
    data = read(tmp_path, on_error="skip", batch_size=1)
    assert len(list(data)) == 1
    assert len(data.skipped) == 1
    assert "a.png cannot be read" in data.skipped[0]


# -- preparing -------------------------------------------------------------------------------------


def test_what_is_prepared(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", {"a": [1.0, 2.0], "b": [3.0, 4.0]})
    data = read(path, preprocess=lambda x: 2 * x[:, :1])
    assert both(data)[0].tolist() == [[2.0], [4.0]]
    assert data.columns is None  # they are no longer those of the table
    with pytest.raises(ValueError, match=r"preprocess made \(1, 2\) of a batch of shape \(2, 2\)"):
        both(read(path, preprocess=lambda x: x[:1]))
    with pytest.raises(ValueError, match="preprocess failed with ZeroDivisionError"):
        both(read(path, preprocess=lambda x: 1 // 0))
    with pytest.raises(ValueError, match="preprocess made str"):
        both(read(path, preprocess=str))  # type: ignore[arg-type]


def test_members_that_are_no_arrays_and_numbers_that_torch_has_not(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"1234")
    with pytest.raises(ValueError, match=r"t.npz.*'x' is no array"):
        read(path)
    np.savez(path, x=np.ones((3, 2), dtype=np.longdouble))
    with pytest.raises(ValueError, match=r"t.npz.*'x' holds"):
        read(path)
