"""What is installed: the wheel's files, and a core that works without any extra."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]

# Modules of the extras. Blocked, they are as good as not installed.
EXTRAS = (
    "gpytorch", "jinja2", "laplace", "linear_operator", "matplotlib", "onnx", "onnxruntime",
    "onnxscript", "PIL", "pyarrow", "pytorch_ood", "ray", "scipy", "shtab", "sklearn",
    "torchmetrics", "torchvision", "rgpr_paper",
)  # fmt: skip

BLOCKED = f"""
import sys
for name in {EXTRAS}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
"""

USED = """
import torch, rgpr
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x = torch.randn(200, 4)
y = torch.arange(200) % 3
model = rgpr.RGPR(network).fit([x], progress=False)
model.calibrate([(torch.randn(150, 4), y[:150])], progress=False)
probabilities = model(x[:5])
model.save("model.safetensors")
again = rgpr.load("model.safetensors", nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
assert torch.equal(again(x[:5]), probabilities)
assert float((model(1e12 * x) - 1 / 3).abs().max()) < 0.01
"""

# These are about another library, so that importing them may need it.
OVER_A_LIBRARY = {
    "rgpr._demo",
    "rgpr.baselines.gp_residual",
    "rgpr.integrations.gpytorch",
    "rgpr.integrations.pytorch_ood",
    "rgpr.integrations.sklearn",
    "rgpr.posteriors.gaussian_processes",
    "rgpr.posteriors.svdkl",
    "rgpr.posteriors.svgp",
}

IMPORTED = f"""
import importlib, pkgutil, rgpr
for module in pkgutil.walk_packages(rgpr.__path__, "rgpr."):
    # Triton comes with torch, but not on every system.
    if module.name not in {OVER_A_LIBRARY} and not module.name.startswith("rgpr._backend"):
        importlib.import_module(module.name)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("code", [USED, IMPORTED], ids=["used", "imported"])
def test_the_core_needs_no_extra(code: str, tmp_path: Path) -> None:
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo"], "pip install '.[demo]'"),
        (["paper", "list"], "clone its repository and run `make setup`"),
    ],
)
def test_commands_say_what_is_missing(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(f"from rgpr.cli import main; sys.exit(main({arguments}))", tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupted_while_torch_is_imported_it_leaves_no_traceback(tmp_path: Path) -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["rgpr", "info", "m.safetensors"]
from rgpr_command import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted before anything was done"


def test_the_wheel_holds_the_library_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs the extra dev")
    pytest.importorskip("hatchling", reason="needs the extra dev")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    done = subprocess.run([*command, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    files = (path for kind in ("py", "html") for path in (ROOT / "src/rgpr").rglob(f"*.{kind}"))
    library = {path.relative_to(ROOT / "src").as_posix() for path in files} | {"rgpr_command.py"}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert names == library | {"rgpr/py.typed"} | {f"{info}/{name}" for name in about}
    assert "rgpr = rgpr_command:main" in entry_points
    assert "License-Expression: MIT" in metadata
    assert "Honest confidence" in metadata


def test_a_commit_that_is_built_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """From another folder, with other dates and rights of files, in another time zone."""
    pytest.importorskip("build", reason="needs the extra dev")
    pytest.importorskip("hatchling", reason="needs the extra dev")
    made: list[dict[str, str]] = []
    for number, zone in enumerate(["UTC", "Asia/Kolkata"]):
        copy = tmp_path / str(number) / "rgpr"
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
            shutil.copy(ROOT / name, copy)
        for path in copy.rglob("*.*"):
            path.chmod(0o755 if path.is_dir() else 0o600 + 0o44 * number)
            os.utime(path, (1e9 + 1e6 * number,) * 2)
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy],
            env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "TZ": zone},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        files = (copy / "dist").iterdir()
        made.append({path.name: sha256(path.read_bytes()).hexdigest() for path in files})
    assert sorted(name.rpartition(".")[2] for name in made[0]) == ["gz", "whl"]
    assert made[0] == made[1]


@pytest.mark.slow
def test_the_list_of_materials_names_what_the_wheel_needs(tmp_path: Path) -> None:
    """By the command of `make release`, run on the environment of the tests."""
    pytest.importorskip("cyclonedx_py", reason="needs the extra dev")
    recipe = (ROOT / "Makefile").read_text()
    found = re.search(r"cyclonedx-py (environment .*?) \\\n", recipe)
    assert found is not None
    listed = []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "cyclonedx_py", *found[1].split()]
        command += ["--output-file", str(tmp_path / name), sys.executable]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        listed.append((tmp_path / name).read_text())
    assert listed[0] == listed[1]
    materials = json.loads(listed[0])
    root = materials["metadata"]["component"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (root["name"], root["version"]) == (project["name"], project["version"])
    (needed,) = (d["dependsOn"] for d in materials["dependencies"] if d["ref"] == root["bom-ref"])
    declared = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    assert declared <= {reference.partition("==")[0] for reference in needed}
    assert str(ROOT) not in listed[0]


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.name)
def test_workflows_pin_actions_and_may_only_read(path: Path) -> None:
    text = path.read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action
    # What a job may do beyond that, it asks for itself.
    assert re.search(r"^permissions:\n  contents: read\n\n", text, re.MULTILINE)
    assert "secrets." not in text
