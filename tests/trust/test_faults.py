"""Faults of disks, of other people's files, of loaders and of memory: nothing is lost or half done.

Kills are in ``test_kills.py``; what is here goes wrong inside a process that goes on.
"""

from __future__ import annotations

import copy
import io
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rgpr
from devices import needs_gpu
from networks import mlp
from rgpr._files.inputs.data import read
from rgpr.cli import main
from trust.killer import Killer, killer, room
from user_folder import fitted, here, place

for package in ("PIL", "jinja2", "matplotlib", "pyarrow", "sklearn"):
    pytest.importorskip(package)
if os.name != "posix":
    pytest.skip("needs limits and permissions as POSIX has them", allow_module_level=True)

__all__ = ["fitted", "here", "killer", "place", "room"]
NOBODY = 65534
MODEL = ["--model", "command_nets:digits", "--no-progress"]
PREDICT = ["predict", "m.safetensors", "new.npz", *MODEL, "--batch-size", "64", "--chunk", "128"]
COMMANDS = {
    "predict": [*PREDICT, "--out", "p.parquet"],
    "audit": ["audit", "--fitted", "m.safetensors", *MODEL, "--test", "new.npz", "--out", "r.html"],
    "monitor": ["monitor", "m.safetensors", "new.npz", *MODEL, "--state", "s.safetensors"],
}
OUTPUTS = {"predict": "p.parquet", "audit": "r.html", "monitor": "s.safetensors"}


# -- full disks ------------------------------------------------------------------------------------


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, which stands for a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fitted_model(residual: str = "onset") -> rgpr.RGPR:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = rgpr.RGPR(mlp(), residual=residual).fit(x[:40], progress=False)
    model.calibrate(x[40:], torch.arange(20) % 3, progress=False)
    return model


def test_a_save_on_a_full_disk(
    tmp_path: Path, amount: Callable[[int, int], int], tally: Callable[..., None]
) -> None:
    model, path = fitted_model(), tmp_path / "m.safetensors"
    model.save(path)
    before, random = path.read_bytes(), Random(0)
    for _ in range(amount(20, 300)):
        with (
            full_after(random.randrange(len(before))),
            pytest.raises(OSError, match=r"m\.safetensors could not be written|File too large"),
        ):
            model.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["m.safetensors"]
        tally("saves on a full disk")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_full_disk(
    command: str,
    fitted: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    """It says so, leaves what was there, and the same command does all of it once there is room."""
    shutil.copy(fitted / "m.safetensors", here)
    run, out = COMMANDS[command], here / OUTPUTS[command]
    status = main(run)
    assert status in (0, 3)
    whole, names, random = out.read_bytes(), sorted(os.listdir(here)), Random(0)
    kept = whole if command == "monitor" else b"what was there before"
    for _ in range(amount(2, 30)):
        out.write_bytes(kept)
        if command == "monitor":
            out.unlink()
        with full_after(random.randrange(len(whole) // 2)):
            assert main(run) == 1
        said = capsys.readouterr().err
        assert re.search("too large|could not be written|No space", said), said
        assert "Traceback" not in said
        assert not out.exists() if command == "monitor" else out.read_bytes() == kept
        assert main(run) == status
        found = out.read_bytes()
        assert without_times(found) == without_times(whole)
        assert sorted(os.listdir(here)) == names
        tally(f"runs of rgpr {command} on a full disk")


def without_times(content: bytes) -> bytes:
    return re.sub(rb"\d+\.\d\d ms", b"", content)


# -- folders that may not be written to ------------------------------------------------------------


@pytest.mark.parametrize("command", ["save", *COMMANDS])
def test_a_folder_that_may_not_be_written_to(
    command: str, fitted: Path, room: Path, killer: Killer, tally: Callable[..., None]
) -> None:
    """By a user whom permissions stop; nothing is left behind, and the error names the place."""
    folder = room / "locked"
    folder.mkdir()
    for name in ("command_nets.py", "m.safetensors", "new.npz"):
        shutil.copy(fitted / name, folder)
        (folder / name).chmod(0o644)
    room.chmod(0o755)
    folder.chmod(0o555)
    before = sorted(os.listdir(folder))
    run = ["save", "mine.safetensors"] if command == "save" else COMMANDS[command]
    # Permissions do not stop root, so root becomes somebody else.
    ended = killer.run(run, folder, user=NOBODY if os.geteuid() == 0 else None)
    folder.chmod(0o755)  # so that an ordinary user can remove it
    assert ended["status"] not in (0, 3)
    assert re.search(r"Permission denied|you may not write", ended["said"]), ended["said"]
    assert ("Traceback" in ended["said"]) == (command == "save")
    assert sorted(os.listdir(folder)) == before
    tally("writes to a folder that may not be written to")


# -- images ----------------------------------------------------------------------------------------


def test_damaged_images_are_left_out_and_listed(
    tmp_path: Path, amount: Callable[[int, int], int], tally: Callable[..., None]
) -> None:
    """Of every folder each image is either read or named with a reason; by default it is a stop."""
    from PIL import Image

    random, wholes = Random(0), []
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    for form in ("png", "jpeg", "webp", "bmp"):
        made = io.BytesIO()
        Image.fromarray(pixels).save(made, form)
        wholes.append((form, made.getvalue()))
    for number in range(amount(40, 800)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for count, (form, content) in enumerate(wholes):
            changed = bytearray(content)
            for _ in range(random.choice([0, 1, 5])):
                changed[random.randrange(len(changed))] = random.randrange(256)
            end = random.choice([len(changed), random.randrange(len(changed))])
            (folder / f"{count}.{form}").write_bytes(changed[:end])
        how: dict[str, Any] = {"size": (8, 8), "channels": 3}
        data = read(folder, on_error="skip", **how)
        rows = sum(len(piece.x) for piece in data.pieces())
        assert rows + len(data.skipped) == len(wholes)
        assert all(str(folder) in line for line in data.skipped)
        if data.skipped:
            with pytest.raises(ValueError, match=rf"{folder}.*--on-error skip"):
                list(read(folder, **how).pieces())
        tally("damaged images listed and left out", len(data.skipped))
        tally("folders of damaged images read")


# -- loaders ---------------------------------------------------------------------------------------


class OwnError(Exception):
    """An error of the user's own."""


def breaking(batches: list[Any], at: int, error: BaseException) -> Any:
    """Batches that end in an error; each pass gets as far."""

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            yield from batches[:at]
            raise error

        def __len__(self) -> int:
            return len(batches)

    return Loader()


def state(model: rgpr.RGPR) -> dict[str, Any]:
    found = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    return {**found, "repr": repr(model), "modes": modes}


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return list(before) == list(after) and all(
        torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        for name, value in before.items()
    )


@pytest.mark.parametrize("what", ["fit", "calibrate", "tune", "predict", "score"])
def test_a_loader_that_fails_on_the_way(
    what: str, amount: Callable[[int, int], int], tally: Callable[..., None]
) -> None:
    """The error is the user's own, and the model is as it was."""
    x = torch.randn(120, 4)
    batches = list(zip(x.split(10), (torch.arange(120) % 3).split(10), strict=True))
    for at in range(0, len(batches), amount(4, 1)):
        model = fitted_model("paper" if what == "tune" else "onset")
        error = OwnError("the disk of the user")
        loader, before = breaking(batches, at, error), state(model)
        calls: dict[str, Callable[[], Any]] = {
            "fit": lambda m=model, d=loader: m.fit(d, progress=False),
            "calibrate": lambda m=model, d=loader: m.calibrate(d, progress=False),
            "tune": lambda m=model, d=loader: m.tune(d, progress=False),
            "predict": lambda m=model, d=loader: m.predict(d, progress=False),
            "score": lambda m=model, d=loader: [m.score(each[0]) for each in d],
        }
        with pytest.raises(OwnError) as caught:
            calls[what]()
        assert caught.value is error
        assert same(before, state(model))
        tally(f"loaders that failed during {what}")


# -- memory ----------------------------------------------------------------------------------------


class Hungry(nn.Sequential):
    """Has no memory for more than 16 rows."""

    kind: type[BaseException] = torch.OutOfMemoryError

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 16:
            raise self.kind("CUDA out of memory. Tried to allocate 2 GiB.\nAnd much more.")
        return super().forward(x)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_too_little_memory_names_the_batch(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, tally: Callable[..., None]
) -> None:
    monkeypatch.setattr(Hungry, "kind", kind)
    x, y = torch.randn(64, 4), torch.arange(64) % 3
    model = rgpr.RGPR(Hungry(*mlp()), residual="paper").fit(list(x.split(16)), progress=False)
    held_out = torch.randn(64, 4).split(16)
    model.calibrate(list(zip(held_out, y.split(16), strict=True)), progress=False)
    before = state(model)
    large = [(x[:40], y[:40]), (x[40:], y[40:])]
    calls = (
        lambda: model(x[:40]),
        lambda: model.score(x[:40]),
        lambda: model.predict(large, progress=False),
        lambda: model.calibrate(large, progress=False),
        lambda: model.tune(large, progress=False),
        lambda: model.fit(large, progress=False),
        lambda: rgpr.Monitor(model).update(x[:40]),
        lambda: rgpr.evaluate(model, large, progress=False),
    )
    for call in calls:
        with pytest.raises(kind, match=r"a batch of 40 rows .*batch_size=20 .*CUDA out of memory"):
            call()
        assert same(before, state(model))
        tally("calls without memory for a batch")
    model.predict(list(x.split(16)), progress=False)


@contextmanager
def little_gpu_memory(more: int) -> Iterator[None]:
    """Let this process take so many bytes of the GPU beside those that it has."""
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


@needs_gpu
def test_a_gpu_without_memory_names_the_batch() -> None:
    """torch's own error, and not one that the network raises in its place."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3)).cuda()
    x = torch.randn(64, 4, device="cuda")
    model = rgpr.RGPR(network).fit([x], progress=False)
    expected, large = model(x), torch.randn(2**16, 4, device="cuda")  # a GiB behind the first layer
    before = state(model)
    words = r"a batch of 65536 rows .*batch_size=32768 .*out of memory"
    with little_gpu_memory(2**28):
        with pytest.raises(torch.OutOfMemoryError, match=words):
            model(large)
        assert same(before, state(model))
        torch.testing.assert_close(model(x), expected)
    assert model(large).isfinite().all()


def test_commands_without_memory_name_the_option(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str], tally: Callable[..., None]
) -> None:
    shutil.copy(fitted / "m.safetensors", here)
    fit = ["fit", "--weights", "weights.safetensors", "--train", "train.npz", *MODEL]
    commands = [*COMMANDS.values(), [*fit, "--out", "n.safetensors"]]
    for command in commands:
        run = [part.replace("command_nets:digits", "command_nets:hungry") for part in command]
        before = sorted(os.listdir(here))
        assert main([*run, "--batch-size", "48"]) == 1
        said = capsys.readouterr().err
        assert re.search(r"a batch of 48 rows .* --batch-size 24", said), said
        assert "And much more" not in said
        left = set(os.listdir(here)) - set(before) - {"__pycache__", "s.safetensors.lock"}
        assert not left
        assert main([*run, "--batch-size", "16"]) in (0, 3)
        tally("commands without memory for a batch")
    sys.modules.pop("command_nets", None)
