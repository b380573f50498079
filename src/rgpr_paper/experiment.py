"""What every experiment is made of: a context, and units of work that are run once.

A unit, such as one seed, is one file ``OUT/EXPERIMENT/UNIT.json``, with its arrays beside it in
``UNIT.safetensors`` where it has some. A run that was stopped goes on with the units that have no
file; a unit made with other settings is refused. A unit whose data are missing is noted in
``gaps.json`` and the run goes on. Everything that is shown later comes from these files alone.

An experiment is a module of :mod:`rgpr_paper` with two functions: ``run(context)`` makes the unit
files by :func:`run_units`, and ``render(folder)`` turns them into a :class:`~.section.Section`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rgpr import __version__
from rgpr._atomic import replacing
from rgpr._network.checks import one_of
from rgpr.saving.container import read, write

from .data import MissingDataError

__all__ = [
    "Context",
    "Result",
    "Unit",
    "gaps",
    "read_units",
    "run_seeds",
    "run_units",
    "write_text",
]

GAPS = "gaps.json"
# A unit's numbers; its arrays, if any, are the tensors under the key "arrays".
Result = dict[str, Any]
_PACKAGES = ("torch", "numpy", "laplace-torch", "gpytorch", "pytorch-ood", "scikit-learn")


@dataclass(frozen=True)
class Context:
    """How to run.

    Attributes:
        out: Folder for the files of all experiments.
        data: Folder that holds the data sets, see :mod:`rgpr_paper.data`.
        device: Where to train and predict.
        seeds: One network each.
        recipe: ``"fast"`` or ``"paper"``: how image networks are trained.
        small: A small version, on digits or made data, to see that everything works.
        sets: In-distribution image sets; ``None`` for the experiment's own.
        download: Let torchvision download what is missing.
    """

    out: Path
    data: Path | None = None
    device: str = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2)
    recipe: str = "fast"
    small: bool = False
    sets: tuple[str, ...] | None = None
    download: bool = False

    def __post_init__(self) -> None:
        one_of("recipe", self.recipe, ("fast", "paper"))
        if not self.seeds:
            raise ValueError("no seeds; give at least one")
        if self.data is not None and not self.data.is_dir() and not self.download:
            raise ValueError(
                f"there is no folder {self.data}; name the one with the data sets, or add "
                "--download to fill it"
            )
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"device {self.device!r}: use cpu, cuda or cuda:1") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {self.device!r}: torch finds no GPU here; use --device cpu")

    def image_sets(self, *default: str) -> tuple[str, ...]:
        """The in-distribution sets to run: those asked for, the digits if small, or these."""
        return self.sets or (("digits",) if self.small else default)

    def command(self, experiment: str) -> str:
        """The command that makes the same, with ``ROOT`` for the folder of data."""
        parts = ["rgpr paper run", experiment, "--small" if self.small else ""]
        parts += ["--data ROOT" if self.data else "", f"--device {self.device}"]
        parts += [f"--seeds {' '.join(map(str, self.seeds))}", f"--recipe {self.recipe}"]
        parts += [f"--sets {' '.join(self.sets)}" if self.sets else "", f"--out {self.out.name}"]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Unit:
    """A finished unit, as its files have it.

    Attributes:
        name: Of the unit.
        settings: What it was made with; a unit with others is not the same.
        about: Command, date, hardware, versions, seconds.
        result: Its numbers; ``None`` stands for infinities.
        arrays: Its tensors.
    """

    name: str
    settings: dict[str, Any]
    about: dict[str, Any]
    result: Result
    arrays: dict[str, Tensor]


def run_units(
    context: Context, experiment: str, units: Mapping[str, Callable[[], Result]], **settings: Any
) -> None:
    """Run the units that have no file yet.

    Args:
        context: How to run.
        experiment: Its name, and that of its folder.
        units: By name, what makes their results. A result is JSON-able but for the tensors of a
            flat dict under ``"arrays"``.
        **settings: What, beside ``small``, makes a unit another one: JSON-able.

    Raises:
        ValueError: A file of a run with other settings is in the way.
    """
    folder = context.out / experiment
    folder.mkdir(parents=True, exist_ok=True)
    identity = _finite({"small": context.small, **settings})
    waiting = [name for name in units if not _done(folder / f"{name}.json", identity)]
    missing = {name: gap for name, gap in _read_gaps(folder).items() if name not in units}
    bar = tqdm(waiting, experiment, len(units), initial=len(units) - len(waiting), disable=None)
    for name in bar:
        bar.set_postfix_str(name)
        started = time.perf_counter()
        try:
            with _exact_products():
                result = units[name]()
        except MissingDataError as error:
            if error.remedy not in missing.values():  # once for all units that need it
                tqdm.write(f"{experiment}, {name}: {error}", sys.stderr)
            missing[name] = error.remedy
            continue
        arrays = result.pop("arrays", {})
        about = {**_about(context, experiment), "seconds": time.perf_counter() - started}
        if arrays:
            write(folder / f"{name}.safetensors", arrays, {"experiment": experiment, "unit": name})
        content = {"unit": name, "settings": identity, "about": about, "result": result}
        write_json(folder / f"{name}.json", content)
    if missing:
        write_json(folder / GAPS, missing)
    else:
        (folder / GAPS).unlink(missing_ok=True)


def run_seeds(
    context: Context,
    experiment: str,
    sets: Sequence[str],
    make: Callable[[Context, str, int], Result],
    **settings: Any,
) -> None:
    """:func:`run_units` with a unit ``SET-seedN`` for each image set and seed of the context.

    Args:
        context: How to run.
        experiment: Its name.
        sets: The in-distribution sets.
        make: Makes a unit's result from context, set and seed.
        **settings: See there; the recipe is one of them.
    """
    for name in sets:
        units = {f"{name}-seed{seed}": partial(make, context, name, seed) for seed in context.seeds}
        run_units(context, experiment, units, recipe=context.recipe, **settings)


def read_units(folder: Path) -> list[Unit]:
    """All finished units of an experiment's folder, in the order of their names."""
    return [_read(path) for path in sorted(folder.glob("*.json"), key=_natural) if _is_unit(path)]


def gaps(folder: Path) -> list[str]:
    """For the units whose data were missing: what is missing, and how to get it."""
    units: dict[str, list[str]] = {}
    for unit, remedy in _read_gaps(folder).items():
        units.setdefault(remedy, []).append(unit)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {remedy}"
        for remedy, names in units.items()
    ]


def _read_gaps(folder: Path) -> dict[str, str]:
    """What each unit lacks."""
    path = folder / GAPS
    missing: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return missing


def write_json(path: Path, content: Any) -> None:
    """Write JSON, all of it or nothing, with ``null`` for what is not finite."""
    write_text(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def _is_unit(path: Path) -> bool:
    return path.name != GAPS


def _read(path: Path) -> Unit:
    content = json.loads(path.read_text())
    beside = path.with_suffix(".safetensors")
    arrays = read(beside)[0] if beside.exists() else {}
    return Unit(path.stem, content["settings"], content["about"], content["result"], arrays)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts ``seed10`` behind ``seed2``."""
    return [
        (int(part or -1), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", path.stem)
    ]


def _done(path: Path, identity: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    found = json.loads(path.read_text())["settings"]
    differing = [
        f"{name} was {found.get(name)!r} and is {identity.get(name)!r}"
        for name in {**found, **identity}
        if found.get(name) != identity.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} was made with other settings: {'; '.join(differing)}. Run with the same, "
            "remove the file, or choose another --out"
        )
    return True


def _about(context: Context, experiment: str) -> dict[str, Any]:
    device = torch.device(context.device)
    cpu = f"CPU, {platform.machine()}, threads: {torch.get_num_threads()}"
    return {
        "command": context.command(experiment),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "versions": {"rgpr": __version__, "python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this source tree, or what ``RGPR_COMMIT`` says where there is none to ask."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or os.environ.get("RGPR_COMMIT")


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@contextmanager
def _exact_products() -> Iterator[None]:
    """Matrix products in full float32, also where the device has faster ones."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _finite(content: Any) -> Any:
    """The same as JSON has it, with ``None`` for what is not finite."""
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
