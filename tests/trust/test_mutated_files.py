"""Thousands of changed files: each is refused by name, or holds what the setters allow.

No change may end in another error, in code that is run, in a process that hangs, or in memory that
the file's own size does not explain; and the network that a file is loaded into stays as it was.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rgpr
from rgpr._files.outputs.joining import join
from rgpr._files.outputs.parts import Parts
from rgpr.audit.monitor.unfinished import Unfinished
from trust.limits import little_memory, no_hang
from trust.mutations import mutated_json, mutated_npz, mutated_safetensors, states_an_old_format

FORMATS = sorted((Path(__file__).parents[1] / "formats").glob("*.safetensors"))
# What nothing but numbers never does: unpickle, start a process, connect, write or remove a file.
_FORBIDDEN = (
    "pickle.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.",
    "os.remove", "os.rename", "shutil.",
)  # fmt: skip
_seen: list[str] | None = None


def _watch(event: str, about: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    writes = event == "open" and isinstance(about[2], int) and about[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event.startswith(_FORBIDDEN):
        _seen.append(f"{event} {about}")


sys.addaudithook(_watch)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def calibrated(base: Any) -> rgpr.RGPR:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = rgpr.RGPR(base).fit(x[:40], progress=False)
    model.calibrate(x[40:], torch.arange(20) % 3, progress=False)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, nn.Module]]:
    """Model files of every format and of most posteriors, with networks that they fit."""
    torch.manual_seed(0)
    folder, network = tmp_path_factory.mktemp("models"), small()
    collector = rgpr.posteriors.SWAGCollector(network)
    for _ in range(3):
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        collector.collect()
    bases = {
        "map": (small(), small()),
        "ensemble": ([small(), small()], small()),
        "dropout": (rgpr.posteriors.MCDropout(dropping()), dropping()),
        "swag": (collector.posterior(), small()),
    }
    found = [(path.read_bytes(), small()) for path in FORMATS]
    for name, (base, twin) in bases.items():
        calibrated(base).save(folder / name)
        found.append(((folder / name).read_bytes(), twin))
    return found


def check_model(model: rgpr.RGPR) -> None:
    """A model that was loaded has what its setters would have taken, and answers or says why not.

    A file on purpose may name another layer, or hold weights with which every answer is a NaN.
    """
    model.sigma2, model.temperature = model.sigma2, model.temperature
    for learned in (model._references, model._label_scores):
        assert learned is None or bool((learned[1:] >= learned[:-1]).all())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    try:
        found, _ = model(x), model.score(x)
        p_values = found if model._references is None else model.p_value(x)
    except (ValueError, RuntimeError):
        return
    assert bool((found.isnan() | ((found >= 0) & (found <= 1 + 1e-6))).all())
    assert bool((p_values.isnan() | ((p_values >= 0) & (p_values <= 1 + 1e-6))).all())


def tried(load: Callable[[], Any], path: Path, kinds: Counter[str], what: str) -> Any:
    """What a file holds, or ``None`` where it is refused by a ``ValueError`` that names it."""
    global _seen
    _seen = []
    try:
        with little_memory(), no_hang(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = load()
    except ValueError as error:
        if str(path) not in str(error):
            raise
        kinds[f"{what}: refused by name"] += 1
        return None
    finally:
        done, _seen = _seen, None
    assert not done, done
    kinds[f"{what}: loaded, with numbers that the setters allow"] += 1
    return found


def test_models(
    models: list[tuple[bytes, nn.Module]],
    tmp_path: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    kinds: Counter[str] = Counter()
    path, contents = tmp_path / "changed.safetensors", [content for content, _ in models]
    for seed in range(amount(120, 2000)):
        content, twin = models[seed % len(models)]
        changed, sealed = mutated_safetensors(content, contents, Random(seed))
        path.write_bytes(changed)
        network = copy.deepcopy(twin)
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        with noted(seed):
            model = tried(lambda n=network: rgpr.load(path, n), path, kinds, "mutated model files")
            if model is not None:
                assert sealed or may_load_unsealed(changed, contents)
                check_model(model)
                continue
            after = network.state_dict()
            assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    told(kinds, tally)


def may_load_unsealed(changed: bytes, contents: list[bytes]) -> bool:
    """Whether a file into which no right checksum was put may load all the same.

    A splice can give another whole file. Formats 1 and 2 have no checksum, so whoever states one of
    them and takes the checksum out has a file that nothing but its content can refuse. Every other
    change has to be found by the checksum.
    """
    return changed in contents or states_an_old_format(changed)


@contextmanager
def noted(seed: int) -> Iterator[None]:
    """Say in an error which change it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def told(kinds: Counter[str], tally: Callable[..., None]) -> None:
    assert len(kinds) == 2, f"all of them ended alike: {kinds}"
    for what, count in kinds.items():
        tally(what, count)


# -- states of monitors ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> tuple[rgpr.RGPR, list[bytes]]:
    """A model, and states of its monitors: new ones, ones with labels and an alarm, and a part."""
    torch.manual_seed(0)
    model, folder = calibrated(small()), tmp_path_factory.mktemp("states")
    monitor = rgpr.Monitor(model, window=10)
    monitor.save(folder / "new")
    monitor.update(torch.randn(50, 4), at=3.0)
    monitor.label(torch.arange(20) % 3, torch.arange(1, 21), predicted=model(torch.randn(20, 4)))
    monitor.update(9 * torch.randn(50, 4))
    monitor.save(folder / "old")
    part = Unfinished(folder / "s", {"a": 1}, 0.0)
    part.rows = 50
    part.write(monitor)
    return model, [(folder / name).read_bytes() for name in ("new", "old", "s.part")]


def check_monitor(monitor: rgpr.Monitor) -> None:
    """A monitor that was loaded goes on: its capital and its p-values are numbers."""
    assert 0 < monitor.alpha < 1
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    monitor.update(x)
    assert np.isfinite(monitor._martingale.log).all()
    json.loads(monitor.to_json_line())
    monitor.prometheus()


def test_states_of_monitors(
    watching: tuple[rgpr.RGPR, list[bytes]],
    tmp_path: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    model, contents = watching
    kinds: Counter[str] = Counter()
    state = tmp_path / "s.safetensors"
    for seed in range(amount(60, 700)):
        content = contents[seed % len(contents)]
        path = state.with_name("s.safetensors.part") if seed % len(contents) == 2 else state
        for each in (state, state.with_name("s.safetensors.part")):
            each.unlink(missing_ok=True)
        changed, sealed = mutated_safetensors(content, contents, Random(seed))
        path.write_bytes(changed)
        run = Unfinished(state, {"a": 1}, 0.0)
        with noted(seed):
            monitor = tried(lambda r=run: r.begun(model), path, kinds, "mutated monitor states")
            if monitor is not None:
                assert sealed or may_load_unsealed(changed, contents)
                check_monitor(monitor)
    told(kinds, tally)


# -- half-finished answers -------------------------------------------------------------------------


def begun(folder: Path) -> Path:
    """The parts of three finished chunks."""
    parts = Parts(folder / "p.npz", {"chunk": 20})
    with parts.held():
        for number in range(3):
            rows = np.arange(20.0) + number
            parts.add({"score": rows, "label": rows.astype(int), "p": rows[:, None] * [1, 2]}, [])
    return parts.folder


def test_half_finished_answers(
    tmp_path: Path, amount: Callable[[int, int], int], tally: Callable[..., None]
) -> None:
    whole = begun(tmp_path)
    contents = {path.name: path.read_bytes() for path in whole.iterdir() if path.suffix != ""}
    kinds: Counter[str] = Counter()
    for seed in range(amount(60, 500)):
        random = Random(seed)
        name = random.choice(sorted(contents))
        change = mutated_json if name.endswith(".json") else mutated_npz
        for each, content in contents.items():
            (whole / each).write_bytes(content)
        changed = change(contents[name], list(contents.values()), random)
        (whole / name).write_bytes(changed)
        if change is mutated_npz and random.random() < 0.5:
            state = json.loads(contents["parts.json"])
            state["checksums"][int(name[:8])] = sha256(changed).hexdigest()
            (whole / "parts.json").write_text(json.dumps(state))
        with noted(seed):
            rows = tried(lambda: joined(tmp_path), whole, kinds, "mutated parts of answers")
            assert rows is None or 0 <= rows <= 60 + 20
    told(kinds, tally)


def joined(folder: Path) -> int:
    """The number of rows that a run finds in the parts and joins."""
    global _seen
    _seen = None  # this run writes, and removes its parts
    parts = Parts(folder / "p.npz", {"chunk": 20})
    with parts.held():
        return join(parts, folder / "joined.npz").rows
