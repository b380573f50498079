"""Units of work: what an experiment computes, in pieces that are run once and kept as files.

A unit, such as one seed, is one file ``OUT/EXPERIMENT/UNIT.json``, with its arrays beside it in
``UNIT.safetensors`` where it has some. A run that was stopped goes on with the units that have no
file; a unit made with other settings is refused. A unit whose data are missing is noted in
``gaps.json`` and the run goes on. Everything that is shown later comes from these files alone.
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
from rgpr._progress import bar
from rgpr.saving.container import read, write

from .context import Context
from .data import MissingDataError
from .hardware import processor

__all__ = [
    "Result",
    "Unit",
    "gaps",
    "made_with",
    "read_units",
    "run_seeds",
    "run_units",
    "write_json",
    "write_text",
]

GAPS = "gaps.json"
# A unit's numbers; its arrays, if any, are the tensors under the key "arrays".
Result = dict[str, Any]
_PACKAGES = (
    "torch",
    "numpy",
    "laplace-torch",
    "gpytorch",
    "pytorch-ood",
    "scikit-learn",
    "torchvision",
    "timm",
    "transformers",
)


@dataclass(frozen=True)
class Unit:
    """A finished unit, as its files have it.

    Attributes:
        name: The unit's name, which is that of its file.
        settings: The settings it was made with; a unit with others is not the same.
        about: The command, date, hardware, versions and seconds of the run that made it.
        result: The unit's numbers; ``None`` stands for infinities.
        arrays: The unit's tensors.
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
        experiment: Name of the experiment and of its folder.
        units: For each unit's name the function that makes its result. A result is JSON-able but
            for the tensors of a flat dict under ``"arrays"``.
        **settings: JSON-able values that, beside ``small``, make a unit another one.

    Raises:
        ValueError: A file of a run with other settings is in the way.
    """
    folder = context.out / experiment
    folder.mkdir(parents=True, exist_ok=True)
    identity = _finite({"small": context.small, **settings})
    waiting = [name for name in units if not _done(folder / f"{name}.json", identity)]
    missing = {name: gap for name, gap in _read_gaps(folder).items() if name not in units}
    done = len(units) - len(waiting)
    shown = bar(waiting, experiment, True, total=len(units), initial=done)
    for name in shown:
        shown.set_postfix_str(name, refresh=sys.stderr.isatty())
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
        about = {
            "command": context.command(experiment),
            **made_with(context.device),
            "seconds": time.perf_counter() - started,
        }
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
        experiment: Name of the experiment.
        sets: The in-distribution sets.
        make: Makes a unit's result from context, set and seed.
        **settings: More settings for :func:`run_units`; the context's recipe is always one.
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


def made_with(device: str = "cpu") -> dict[str, Any]:
    """The date, hardware, versions and commit that a result is made with on a device."""
    kind = torch.device(device)
    cpu = f"CPU, {processor()}, threads: {torch.get_num_threads()}"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name(kind) if kind.type == "cuda" else cpu,
        "versions": {"rgpr": __version__, "python": platform.python_version(), **_versions()},
        **_commit(),
    }


def _commit() -> dict[str, str | bool | None]:
    """The commit of this source tree, and whether the tree was clean.

    Where there is no repository to ask, ``RGPR_COMMIT`` says it, in the same form: a commit that
    ends in ``-dirty`` is of a tree with changes.
    """
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    described = found.stdout.strip() or os.environ.get("RGPR_COMMIT")
    if not described:
        return {"commit": None, "clean": None}
    return {"commit": described.removesuffix("-dirty"), "clean": not described.endswith("-dirty")}


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
