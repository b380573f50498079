"""The commands of the page Command line and of the README work, one after the other."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from rgpr.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("weights.safetensors", "train.npz", "val.npz", "new.csv"):
        os.symlink(place / name, tmp_path / name)
    with np.load(place / "new.npz") as new:
        order = np.random.default_rng(0).permutation(len(new["X"]))
        test = {"x": new["X"][order], "y": new["target"][order]}
    np.savez(tmp_path / "test.npz", **test)
    np.savez(tmp_path / "turned.npz", x=test["x"][:, ::-1].copy())
    os.symlink(place / "new", tmp_path / "photos")
    for name, code in zip(("nets.py", "prepare.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("nets", "prepare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    lines = "".join(blocks("bash")).splitlines()
    assert len(lines) >= 9
    for line in lines:
        name, *arguments = shlex.split(line)
        assert name == "rgpr"
        assert main(arguments) == 0, capsys.readouterr().err
    names = ("answers.parquet", "answers.csv", "scores.csv", "strict.npz", "photos.csv")
    for out in (*names, "report.html", "watch.safetensors", "watch.jsonl"):
        assert (tmp_path / out).is_file()
    with np.load(tmp_path / "strict.npz") as strict:
        assert strict["flag"].dtype == bool
    assert (tmp_path / "photos.csv").read_text().startswith('"path","score"')


def test_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the quick start are all that the command takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    python = blocks("python", ROOT / "README.md")
    (files,) = (block for block in python if "nets.py" in block)
    exec(python[0] + files, {})
    (line,) = blocks("bash", ROOT / "README.md")
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    assert (tmp_path / "report.html").is_file()
