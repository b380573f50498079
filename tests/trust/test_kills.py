"""Processes that are killed at random moments: what they leave is whole, and the next run mends it.

After every kill, a file under a final name is either as it was before or as an undisturbed run
makes it. The next run ends as an undisturbed one does, with the same files and nothing beside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from trust.killer import Killer, killer, room
from user_folder import fitted, place

for package in ("PIL", "jinja2", "matplotlib", "pyarrow", "sklearn", "rgpr_paper"):
    pytest.importorskip(package)
if not hasattr(os, "fork"):
    pytest.skip("this system does not fork", allow_module_level=True)

__all__ = ["fitted", "killer", "place", "room"]
Files = dict[str, Any]
MODEL = ["--model", "command_nets:digits"]
# A few units, some with arrays, and a page.
EXPERIMENT = """
import torch
from rgpr_paper import Experiment, register
from rgpr_paper.section import Section, Text
from rgpr_paper.units import read_units, run_units

def unit(seed):
    x = torch.randn(20000, generator=torch.Generator().manual_seed(seed))
    return {"mean": float(x.mean()), "arrays": {"x": x} if seed % 2 else {}}

def run(context):
    run_units(context, "quick", {f"seed{n}": lambda n=n: unit(n) for n in range(6)})

def render(folder):
    lines = [f"{unit.name}: {unit.result['mean']}" for unit in read_units(folder)]
    return Section([Text(" ".join(lines))])

register(Experiment("quick", "Quick", run, render))
"""


def content(path: Path) -> Any:
    """The bytes of a file, without the date and the times that were measured on the way."""
    if path.suffix == ".json" and path.parent.name == "quick":
        return {key: value for key, value in json.loads(path.read_text()).items() if key != "about"}
    found = path.read_bytes()
    return re.sub(rb"\d+\.\d\d ms|\d{4}-\d\d-\d\d", b"", found) if path.suffix == ".html" else found


def files(folder: Path) -> Files:
    """Every file below a folder, by its name; a folder is ``None``."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else content(path)
        for path in sorted(folder.rglob("*"))
    }


def temporary(name: str) -> bool:
    """Whether a file is one that only a run in progress has."""
    endings = (".parts", ".part", ".lock")
    return any(part.startswith(".") or part.endswith(endings) for part in Path(name).parts)


def killed_often(
    killer: Killer,
    command: list[str],
    start: Path,
    kills: int,
    status: int = 0,
) -> int:
    """Kill a command at so many random moments, each in a folder of its own.

    Args:
        killer: What runs it.
        command: The command; its files are named relative to the current folder.
        start: The folder as it is before the command.
        kills: How many kills.
        status: What the command returns.

    Returns:
        How many kills there were, which is as many as were asked for. A command that ends before
        its kill is not one of them, and another kill is tried, up to ten times as often in all.
    """
    here, seconds = start.with_name("here"), 0.0
    for _ in range(2):  # the first run imports what is left
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(start, here, symlinks=True)
        done = killer.run(command, here)
        assert done["status"] == status, done["said"]
        seconds = done["seconds"]
    before, expected, random, count = files(start), files(here), Random(0), 0
    for _ in range(10 * kills):
        if count == kills:
            break
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(start, here, symlinks=True)
        after = random.uniform(0, seconds)
        ended = killer.run(command, here, after)
        count += ended["killed"]
        if not ended["killed"]:  # the command takes less time now than when it was measured
            seconds = (seconds + after) / 2
        for name, found in files(here).items():
            allowed = (before.get(name), expected.get(name))
            assert temporary(name) or found in allowed, f"{name} is a half file, {after} s"
        again = killer.run(command, here)
        assert again["status"] == status, again["said"]
        found = files(here)
        assert sorted(found) == sorted(expected), f"after a kill at {after} s"
        assert found == expected, f"after a kill at {after} s"
    assert count == kills, f"{10 * kills} tries made {count} kills; {kills} were asked for"
    return count


def test_saves(
    killer: Killer,
    room: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    start = room / "start"
    start.mkdir()
    (start / "m.safetensors").write_text("what was there before")
    tally("saves killed", killed_often(killer, ["save", "m.safetensors"], start, amount(5, 100)))


@pytest.fixture
def start(fitted: Path, room: Path) -> Path:
    """A folder with a model and a few rows of data."""
    folder = room / "start"
    folder.mkdir()
    for name in ("command_nets.py", "m.safetensors"):
        shutil.copy2(fitted / name, folder)
    with np.load(fitted / "new.npz") as new:
        rows = np.random.default_rng(0).permutation(len(new["X"]))[:160]
        np.savez(folder / "new.npz", x=new["X"][rows], y=new["target"][rows])
    return folder


@pytest.mark.parametrize("out", ["p.csv", "p.npz", "p.parquet"])
def test_predictions(
    out: str,
    killer: Killer,
    start: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    rows = ["--batch-size", "8", "--chunk", "16", "--no-progress"]
    command = ["predict", "m.safetensors", "new.npz", *MODEL, "--out", out, *rows]
    tally("runs of rgpr predict killed", killed_often(killer, command, start, amount(2, 34)))


def test_monitors(
    killer: Killer,
    start: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    settings = ["--batch-size", "8", "--save-every", "0", "--no-progress", "--alpha", "0.0001"]
    more = ["--log", "log.jsonl", "--prometheus", "m.prom"]
    command = ["monitor", "m.safetensors", "new.npz", *MODEL, "--state", "s.safetensors"]
    command += [*settings, *more]
    tally("runs of rgpr monitor killed", killed_often(killer, command, start, amount(5, 100)))


def test_audits(
    killer: Killer,
    start: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    command = ["audit", "--fitted", "m.safetensors", *MODEL, "--test", "new.npz", "--out", "r.html"]
    (start / "r.html").write_text("what was there before")
    tally(
        "runs of rgpr audit killed",
        killed_often(killer, [*command, "--no-progress"], start, amount(3, 100)),
    )


def test_experiments(
    killer: Killer,
    room: Path,
    amount: Callable[[int, int], int],
    tally: Callable[..., None],
) -> None:
    start = room / "start"
    start.mkdir()
    (start / "mine.py").write_text(EXPERIMENT)
    command = ["paper", "run", "quick", "--import", "mine.py", "--small", "--out", "."]
    tally("runs of rgpr paper run killed", killed_often(killer, command, start, amount(5, 100)))
