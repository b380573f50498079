from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rgpr
from rgpr.cli import EXTRAS, main


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import rgpr._demo  # noqa: F401  the command would catch the error about a missing extra

    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    assert main(["demo", "--out", str(out), "--quick"]) == 0
    return {"out": out, **json.loads((out / "results.json").read_text())}


def test_demo_writes_its_files(demo: dict[str, Any]) -> None:
    names = sorted(path.name for path in demo["out"].iterdir())
    assert names == ["confidence-far-away.png", "moons.png", "report.html", "results.json"]
    assert "Digits" in (demo["out"] / "report.html").read_text()
    for name in names[:2]:
        assert (demo["out"] / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("task", ["digits", "two moons"])
def test_demo_shows_the_effect(demo: dict[str, Any], task: str) -> None:
    result = demo[task]
    assert set(result["models"]) == {
        "MAP",
        "MAP + RGPR",
        "last-layer Laplace",
        "last-layer Laplace + RGPR",
    }
    for base in ("MAP", "last-layer Laplace"):
        plain, extended = result["models"][base], result["models"][f"{base} + RGPR"]
        assert list(plain["confidence"]) == ["1", "10", "100", "10000", "1e+06"]
        assert extended["accuracy"] >= plain["accuracy"] - 0.005
        assert abs(extended["ece"] - plain["ece"]) < 0.02
        assert plain["confidence"]["1e+06"] > result["uniform"] + 0.25
        assert extended["confidence"]["1e+06"] < result["uniform"] + 0.05


def test_demo_and_its_report_say_the_same(demo: dict[str, Any]) -> None:
    found = demo["digits"]["models"]["last-layer Laplace + RGPR"]["auroc"]
    html = (demo["out"] / "report.html").read_text()
    for kind, auroc in found.items():
        part = html.split(f"<h3>{kind} ")[1]
        row = part.split("<td>RGPR, score</td>")[1]
        assert re.findall(r">([\d.]+)</td>", row)[0] == f"{100 * auroc:.1f}"
    assert "<img" in html  # flat digits are drawn as images


@pytest.mark.usefixtures("demo")
def test_demo_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--out", str(tmp_path), "--quick", "--seed", "1"])
    printed = capsys.readouterr().out
    assert "1/C = 0.100" in printed
    assert "MAP + RGPR" in printed
    assert str(tmp_path / "moons.png") in printed
    assert "how sure each model is over the plane" in printed


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == rgpr.__version__
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


def test_without_the_extras_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("laplace", "matplotlib")):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "rgpr._demo", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["demo"]) == 1
    assert "pip install '.[demo]'" in capsys.readouterr().err


def packages(extra: str) -> set[str]:
    """Names of the packages of an extra, and of the extras that it names."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    found = set()
    for line in tomllib.loads(text)["project"]["optional-dependencies"][extra]:
        name, inside = re.match(r"([\w-]+)(?:\[(.*?)\])?", line).groups()
        found |= set().union(*map(packages, inside.split(","))) if name == "rgpr" else {name}
    return found


@pytest.mark.parametrize("module", EXTRAS)
def test_errors_name_an_extra_that_has_the_package(module: str) -> None:
    brought = {"PIL": "pillow", "laplace": "laplace-torch", "sklearn": "scikit-learn"}
    for extra in EXTRAS[module]:
        assert brought.get(module, module) in packages(extra)


def test_the_extra_cli_runs_a_report_and_a_picture() -> None:
    assert {"jinja2", "matplotlib", "pillow", "pyarrow", "shtab"} <= packages("cli")


def test_importing_it_imports_nothing_heavy() -> None:
    """Extras are imported where they are used, and start-up is torch's."""
    code = "import sys, rgpr; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["laplace", "gpytorch", "matplotlib", "ray", "sklearn", "onnx", "torchvision"]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_interrupted_it_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rgpr_paper.run_experiment", stopped)
    assert main(["paper", "run", "moons"]) == 130
    assert "run the same again" in capsys.readouterr().err


def test_without_the_experiments_it_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rgpr_paper", None)
    assert main(["paper", "list"]) == 1
    assert "clone its repository and run `make setup`" in capsys.readouterr().err
