"""Files that were changed, by accident or on purpose, and saves that were cut short."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rgpr
from networks import mlp
from opening import as_opened
from rgpr._atomic import replacing
from rgpr.residual.recipes import Strategy
from rgpr.saving.container import read, write

Tensors = dict[str, Tensor]


def calibrated() -> rgpr.RGPR:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = rgpr.RGPR(mlp()).fit(x[:40], progress=False)
    model.calibrate(x[40:], torch.arange(20) % 3, progress=False)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "m.safetensors"
    calibrated().save(path)
    return path


def refused(path: Path, words: str = ".") -> None:
    """The file is refused by a ``ValueError`` that names it, and the network is left alone."""
    network = mlp()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=words) as caught:
        rgpr.load(path, network)
    assert str(caught.value).count(str(path)) == 1  # named, and not by two errors about one thing
    after = network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_offset_is_a_distance(tmp_path: Path) -> None:
    """With a negative one even the training data would have a variance."""
    path, x = tmp_path / "m.safetensors", torch.randn(40, 4)
    recipe = rgpr.ResidualRecipe(input=Strategy(offset=1.0))
    model = rgpr.RGPR(mlp(), residual=recipe).fit(x, progress=False)
    model.save(path)
    assert torch.equal(rgpr.load(path, mlp())(3 * x), model(3 * x))
    tensors, about, _ = read(path)
    tensors["layer.0.offset"][1] = -0.5
    write(path, tensors, about)
    refused(path, r"'layer\.0\.offset' holds -0\.5; its numbers must be finite and not negative")


@given(st.data())
def test_no_changed_byte_goes_unseen(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    end = data.draw(st.sampled_from([8, header, len(content)]))  # most bytes are numbers
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] ^= data.draw(st.integers(1, 255))
    changed = whole.with_name("changed.safetensors")
    changed.write_bytes(content)
    if bytes(content) != whole.read_bytes():
        refused(changed)


def test_a_changed_byte_among_the_numbers_is_seen_wherever_it_is(whole: Path) -> None:
    """A bit at the low end of a number leaves a number that every setter takes."""
    content, changed = whole.read_bytes(), whole.with_name("changed.safetensors")
    start = 8 + int.from_bytes(content[:8], "little")
    for place in range(start, len(content), 61):
        other = bytearray(content)
        other[place] ^= 1
        changed.write_bytes(other)
        refused(changed, "is damaged: its bytes do not have the checksum")


def test_a_file_without_its_checksum_is_refused(whole: Path) -> None:
    content = whole.read_bytes()
    for old, new in ((b"rgpr_sha256", b"rgpr_sha257"), (b'rgpr_format":"3', b'rgpr_format":"2')):
        changed = whole.with_name("changed.safetensors")
        changed.write_bytes(content.replace(old, new))
        refused(changed, "checksum")


def changed_number(name: str, value: float) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, about: Any) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def one_entry(tensors: Tensors, about: Any) -> None:
    tensors["residual.sigma2"] = tensors["residual.sigma2"][:1]


def another_width(tensors: Tensors, about: Any) -> None:
    tensors["layer.0.mean"] = tensors["layer.0.mean"][:1]
    tensors["layer.0.scale"] = tensors["layer.0.scale"][:1]


def replaced(key: str, value: Any) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, about: Any) -> None:
        about[key] = value

    return change


def deep(tensors: Tensors, about: Any) -> None:
    nested: Any = 0
    for _ in range(900):
        nested = [nested]
    about["coordinates"] = nested


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced("output", [1]), r"'output' is \[1\]; it must be an index"),
        (replaced("axes", [[2, 1, None]] * 3), r"'axes' holds \[2, 1, None\]"),
        (replaced("axes", [[0, 1, 1]] * 3), r"'axes' holds \[0, 1, 1\]"),
        (changed_number("residual.sigma2", -1.0), r"residual.sigma2' holds -1.*not negative"),
        (changed_number("residual.sigma2", torch.nan), "sigma2' holds nan"),
        (changed_number("residual.typical", torch.inf), "typical' holds inf"),
        (changed_number("residual.onset", -0.5), "onset' holds -0.5"),
        (changed_number("residual.slope", 0.0), "slope' holds 0;.*positive"),
        (changed_number("residual.unit", -1.0), "unit' holds -1"),
        (changed_number("temperature", 0.0), "temperature' holds 0"),
        (changed_number("learned._given_temperature", torch.nan), "_given_temperature' holds nan"),
        (changed_number("learned._references", torch.nan), "_references' holds nan.*ascending"),
        (changed_number("learned._references", -1e9), "_references' holds -1e"),
        (changed_number("learned._label_scores", torch.nan), "_label_scores' holds nan"),
        (changed_number("layer.0.scale", 0.0), "layer.0.scale' holds 0"),
        (changed_number("layer.0.mean", torch.nan), "layer.0.mean' holds nan"),
        (changed_number("layer.1.axes", torch.inf), "layer.1.axes' holds inf"),
        (one_entry, r"sigma2' has shape \(1,\) and should have \(3,\)"),
        (another_width, "coordinates of the input are 1 number"),
        (replaced("layers", ["input", "1", "1"]), "none twice"),
        (replaced("layers", ["1", "input", "3"]), "first must be 'input'"),
        (replaced("layers", ["input", "1", "17"]), "has no attribute"),
        (replaced("layers", ["input", "1"]), "damaged|cannot be used"),
        (replaced("layers", 3), "damaged"),
        (replaced("coordinates", 5), "damaged"),
        (replaced("residual", []), "damaged"),
        (replaced("input_shape", "x"), "damaged"),
        (replaced("nan", "ignore"), "nan='ignore'"),
        (replaced("likelihood", "prophecy"), "prophecy"),
        (deep, "damaged"),
    ],
)
def test_a_file_is_held_to_what_setters_are(
    whole: Path, tmp_path: Path, change: Callable[[Tensors, Any], None], words: str
) -> None:
    tensors, about, _ = read(whole)
    change(tensors, about)
    path = tmp_path / "m.safetensors"
    write(path, tensors, about)
    refused(path, words)


# -- saving over what is there -------------------------------------------------------------------


def test_permissions_stay(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", calibrated()
    for mode in (0o600, 0o640, 0o444):
        path.touch()
        path.chmod(mode)
        model.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.chmod(0o600)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions as POSIX has them")
@pytest.mark.parametrize(("mode", "meanwhile"), [(0o600, 0o600), (0o640, 0o640), (0o400, 0o600)])
def test_nobody_else_reads_what_is_still_being_written(
    mode: int, meanwhile: int, tmp_path: Path
) -> None:
    """Whom the old file keeps out may not read the new one before it is in place, either."""
    path = tmp_path / "a"
    path.touch()
    path.chmod(mode)
    before = os.umask(0)  # so that every other file of this process can be read by all
    try:
        with replacing(path) as temporary:
            temporary.write_text("a secret")
            assert stat.S_IMODE(temporary.stat().st_mode) == meanwhile
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_that_is_read_only_is_replaced(tmp_path: Path) -> None:
    """By a user who is not root, whom no permission stops."""
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o444)
    tmp_path.chmod(0o777)
    program = f"""
import os
if os.getuid() == 0:
    os.setuid(65534)
from rgpr._atomic import replacing
with replacing({str(path)!r}) as temporary:
    temporary.write_text("new")
"""
    source = Path(rgpr.__file__).parent / "_atomic.py"
    alone = tmp_path / "program.py"
    alone.write_text(source.read_text() + program.replace("from rgpr._atomic import replacing", ""))
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    subprocess.run([sys.executable, "-I", str(alone)], check=True)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "m.safetensors", tmp_path / "link.safetensors"
    target.touch()
    link.symlink_to(target)
    calibrated().save(link)
    assert link.is_symlink()
    assert rgpr.load(target, mlp()).layers == rgpr.load(link, mlp()).layers
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.safetensors"]


def test_what_killed_saves_leave_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = f"""
import os, signal
from rgpr._atomic import replacing
with replacing({str(tmp_path / "a")!r}) as temporary:
    temporary.write_text("half")
    temporary.with_name(".tmp123").touch()  # as writers of other libraries do
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", killed], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    with replacing(tmp_path / "b") as other:
        other.write_text("b")
    assert set(os.listdir(tmp_path)) == {left, "b"}  # it may be for another file
    with replacing(tmp_path / "a") as mine, replacing(tmp_path / "a") as second:
        mine.write_text("mine")
        second.write_text("second")
        assert left not in os.listdir(tmp_path)
        assert mine.exists()  # which a process that runs is writing
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "a").read_text() == "mine"


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "a", []
    flush = os.fsync

    def noted(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else ""
        seen.append((name, path.exists()))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(path) as temporary:
        temporary.write_text("all of it")
    (first, early), (folder, late) = seen
    assert not early
    assert late
    if sys.platform == "linux":
        assert first.endswith("/a")
        assert first != str(path)
        assert folder == str(tmp_path)


def test_a_loaded_model_does_not_depend_on_its_file(whole: Path, tmp_path: Path) -> None:
    """Not even where the file is written over in place, as `cp` does."""
    served, x = tmp_path / "served.safetensors", torch.randn(20, 4)
    served.write_bytes(whole.read_bytes())
    model = rgpr.load(served, mlp())
    before = model.score(x), model.p_value(x)
    with served.open("r+b") as file:
        file.write(bytes(served.stat().st_size))
    assert torch.equal(model.score(x), before[0])
    assert torch.equal(model.p_value(x), before[1])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, list[rgpr.RGPR], Callable[[], None]]]:
    """A model's file, two models, and a function that replaces the file by the other model's."""
    path, turns = tmp_path / "served.safetensors", itertools.count()
    models = [rgpr.RGPR(mlp()).fit(scale * torch.randn(40, 4)) for scale in (1, 10)]
    for number, model in enumerate(models):
        model.save(tmp_path / f"{number}")
    contents = [(tmp_path / f"{number}").read_bytes() for number in range(2)]

    def replace() -> None:
        (tmp_path / "next").write_bytes(contents[next(turns) % 2])
        os.replace(tmp_path / "next", path)

    replace()
    yield path, models, replace
    as_opened.clear()


def test_a_file_that_is_replaced_while_it_is_read(
    served: tuple[Path, list[rgpr.RGPR], Callable[[], None]],
) -> None:
    """Its header has been read, and its checksum and tensors have not."""
    path, (old, new), replace = served

    def once() -> None:
        del as_opened[str(path)]
        replace()

    as_opened[str(path)] = once
    loaded, x = rgpr.load(path, mlp()), torch.randn(20, 4)
    assert not as_opened
    assert torch.equal(loaded.score(x), new.score(x))
    assert not torch.equal(loaded.score(x), old.score(x))


def test_a_file_that_is_written_all_the_time(
    served: tuple[Path, list[rgpr.RGPR], Callable[[], None]],
) -> None:
    """It is not called damaged, and loading comes to an end."""
    path, _, replace = served
    as_opened[str(path)] = replace
    refused(path, "was written each of the 10 times that it was read; load it once whoever writes")


def test_a_file_that_two_saves_replace_while_it_is_read(
    served: tuple[Path, list[rgpr.RGPR], Callable[[], None]],
) -> None:
    """The first model is saved again before the checksum is read, which then fits the header."""
    path, (old, _), replace = served
    seen: list[int] = []

    def twice() -> None:
        seen.append(path.stat().st_ino)
        if len(seen) == 1:
            replace(), replace()

    as_opened[str(path)] = twice
    loaded, x = rgpr.load(path, mlp()), torch.randn(20, 4)
    assert len(set(seen)) == len(seen) == 2  # read again
    assert torch.equal(loaded.score(x), old.score(x))
