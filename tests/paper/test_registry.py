"""Experiments and detectors that are added by a file, inside the package or outside of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rgpr_paper.experiments
from rgpr.baselines.detectors import DETECTORS, Detector, register_detector
from rgpr.cli import main
from rgpr_paper import Context, Experiment, all_experiments, experiment, register, run_experiment
from rgpr_paper.experiments import detection
from rgpr_paper.methods import contestants
from rgpr_paper.section import Section, Text
from rgpr_paper.units import read_units, run_units

OWN = '''
"""An experiment in a file of the user's."""

from rgpr_paper import Experiment, register
from rgpr_paper.section import Claim, Section, Text
from rgpr_paper.units import read_units, run_units


def run(context):
    units = {f"seed{seed}": lambda seed=seed: {"value": 10 + seed} for seed in context.seeds}
    run_units(context, "my-own", units)


def render(folder):
    values = [unit.result["value"] for unit in read_units(folder)]
    claim = Claim("values are above nine", str(values), min(values) > 9, ours=True)
    return Section([Text(f"The values are {values}.")], [claim])


register(Experiment(name="my-own", title="An experiment of my own", run=run, render=render))
'''


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes what a test registers or imports out of the lists again."""
    before, modules = dict(DETECTORS), set(sys.modules)
    all_experiments()  # a test's copy starts with the package's own
    monkeypatch.setattr(experiment, "_REGISTERED", dict(experiment._REGISTERED))
    yield
    DETECTORS.clear()
    DETECTORS.update(before)
    for name in set(sys.modules) - modules:
        if name.endswith("my_own"):
            del sys.modules[name]


@pytest.mark.parametrize("named", ["file", "module"])
def test_an_experiment_outside_the_package(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed, run by name and part of the report, where the user names its module."""
    (tmp_path / "my_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    module = "my_own" if named == "module" else str(tmp_path / "my_own.py")
    out = tmp_path / "out"
    assert main(["paper", "run", "my-own", "--out", str(out)]) == 2
    assert "no experiment 'my-own'" in capsys.readouterr().err
    assert main(["paper", "list", "--import", module]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["my-own", "An", "experiment"]
    options = ["--import", module, "--out", str(out)]
    assert main(["paper", "run", "my-own", "--seeds", "1", "2", *options]) == 0
    assert [unit.result["value"] for unit in read_units(out / "my-own")] == [11, 12]
    page = (out / "my-own" / "my-own.md").read_text()
    assert "The values are [11, 12]." in page
    assert "| values are above nine | [11, 12] | holds |" in page
    command = json.loads((out / "my-own" / "seed1.json").read_text())["about"]["command"]
    assert command.startswith(f"rgpr paper run my-own --import {Path(module).name} --device cpu")
    assert main(["paper", "report", *options]) == 0
    report = (out / "report.md").read_text()
    assert "| An experiment of my own | ours | run | - | 1 of 1 hold |" in report
    assert "The values are [11, 12]." in (out / "report.html").read_text()


def test_modules_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "list", "--import", "no_such_module"]) == 2
    assert "there is no module no_such_module" in capsys.readouterr().err
    assert main(["paper", "list", "--import", str(tmp_path / "none.py")]) == 2
    assert "none.py to import" in capsys.readouterr().err
    (tmp_path / "my_own.py").write_text("import no_such_package")
    assert main(["paper", "list", "--import", str(tmp_path / "my_own.py")]) == 1
    assert "No module named 'no_such_package'" in capsys.readouterr().err


def test_the_help_says_whose_code_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["paper", "run", "--help"])
    assert "its code is run" in " ".join(capsys.readouterr().out.split())


def test_an_experiment_from_python(tmp_path: Path) -> None:
    def run(context: Context) -> None:
        run_units(context, "in-python", {"one": lambda: {"value": 1}})

    def render(folder: Path) -> Section:
        return Section([Text(f"{len(read_units(folder))} unit")])

    own = register(Experiment("in-python", "In Python", run, render))
    assert list(all_experiments().values())[-1] is own
    assert run_experiment("in-python", Context(tmp_path)) == []
    assert "1 unit" in (tmp_path / "in-python" / "in-python.md").read_text()
    register(replace(own, title="A notebook's cell, run again"))
    with pytest.raises(ValueError, match=r"'moons' is that of rgpr_paper\.experiments\.moons"):
        register(replace(own, name="moons"))
    for name in ("Two Words", "all", "../away", "checkpoints"):
        with pytest.raises(ValueError, match="cannot be named"):
            replace(own, name=name)


def test_every_file_of_the_folder_is_an_experiment() -> None:
    files = sorted(Path(rgpr_paper.experiments.__path__[0]).glob("[!_]*.py"))
    own = [each for each in all_experiments().values() if "rgpr_paper" in each.run.__module__]
    assert sorted(each.name for each in own) == [f.stem.replace("_", "-") for f in files]


def test_a_new_file_in_the_folder_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own.py").write_text(OWN)
    path = [*rgpr_paper.experiments.__path__, str(tmp_path)]
    monkeypatch.setattr(rgpr_paper.experiments, "__path__", path)
    assert all_experiments()["my-own"].run.__module__ == "rgpr_paper.experiments.my_own"


class Norm(Detector):
    def _score(self, x: Tensor) -> Tensor:
        return x.flatten(1).norm(dim=1).double()


def test_a_detector_from_outside_is_one_of_the_methods(tmp_path: Path) -> None:
    assert detection.methods()[-4:] == ("Energy", "KNN", "Mahalanobis", "ViM")
    register_detector("norm")(Norm)
    assert detection.methods()[-5:] == ("Energy", "KNN", "Mahalanobis", "ViM", "Norm")
    context = Context(tmp_path, small=True, seeds=(0,))
    method = contestants(context, "digits", 0).method("Norm")
    x = torch.rand(3, 1, 16, 16)
    torch.testing.assert_close(method.predict(x), -x.flatten(1).norm(dim=1).double())


def test_the_row_of_a_detector_is_shown_without_it(tmp_path: Path) -> None:
    """A report needs the numbers alone: the detector need not be registered any more."""
    results = Path(__file__).parents[2] / "results" / "detection"
    folder = tmp_path / "detection"
    shutil.copytree(results, folder)
    for path in folder.glob("mnist-seed*.json"):
        content = json.loads(path.read_text())
        found = content["result"]["methods"]
        found["Norm"] = found["KNN"]
        path.write_text(json.dumps(content))
    tables = [block for block in detection.render(folder).blocks if hasattr(block, "rows")]
    assert any(row[0] == "Norm" for table in tables for row in table.rows)
