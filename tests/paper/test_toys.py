from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from rgpr.cli import main
from rgpr.kernels import dscs_diag
from rgpr_paper.experiments import construction, contours, moons, toy_regression
from rgpr_paper.units import read_units

TOYS = {
    "construction": ("construction", "growth"),
    "moons": ("moons",),
    "contours": ("contours",),
    "toy-regression": ("toy-regression",),
}


@pytest.fixture(scope="module")
def out(run_small: Callable[[Iterable[str]], Path]) -> Path:
    return run_small(TOYS)


@pytest.mark.parametrize("name", list(TOYS))
def test_pictures_and_page(out: Path, name: str) -> None:
    page = (out / name / f"{name}.md").read_text()
    for picture in TOYS[name]:
        assert (out / name / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / name / f"{picture}.svg").read_text()
        assert f"({picture}.png)" in page
    assert f"rgpr paper run {name} --small" in page


def test_construction(out: Path) -> None:
    (unit,) = read_units(out / "construction")
    x, std = unit.arrays["x"], unit.arrays["std, inf"]
    assert torch.allclose(std.square(), x.abs() ** 3 / 3)
    for k in ("6", "20", "60"):
        # Functions and standard deviation are zero at the origin, and samples fit the latter.
        middle = len(x) // 2
        assert float(unit.arrays[f"std, {k}"][middle]) < 1e-9
        assert float(unit.arrays[f"samples, {k}"][:, middle].abs().max()) < 1e-9
        ratio = unit.arrays[f"samples, {k}"][:, [0, -1]] / unit.arrays[f"std, {k}"][[0, -1]]
        assert 0.2 < float(ratio.square().mean()) < 4
    samples = unit.arrays["samples, inf"]
    assert float(samples[:, len(x) // 2].abs().max()) < 1e-4
    assert 0.2 < float((samples[:, [0, -1]] / std[[0, -1]]).square().mean()) < 4
    assert all(claim.holds for claim in construction.render(out / "construction").claims)
    assert float(dscs_diag(torch.tensor([2.0]))) == pytest.approx(8 / 3)


def test_moons(out: Path) -> None:
    (unit,) = read_units(out / "moons")
    near, far = (unit.arrays[f"LLL-RGPR, {zoom}"].float() for zoom in moons.WIDTHS)
    assert near.shape == (40, 40)
    assert 0.5 <= float(near.min()) < float(near.max()) <= 1
    assert float(far.mean()) < float(unit.arrays["LLL, zoomed out"].float().mean()) - 0.1
    assert all(claim.holds for claim in moons.render(out / "moons").claims)


def test_contours(out: Path) -> None:
    (unit,) = read_units(out / "contours")
    found = unit.result["residuals"]
    assert found["input"]["layers"] == ["input"]
    assert len(found["auto"]["layers"]) == 3
    for layers in contours.LABELS:
        areas = list(found[layers]["areas"].values())
        assert 0 < areas[0] < areas[1] < areas[2] <= 36
    assert all(claim.holds for claim in contours.render(out / "contours").claims)


def test_toy_regression(out: Path) -> None:
    (unit,) = read_units(out / "toy-regression")
    for zoom in toy_regression.WIDTHS:
        means = [unit.arrays[f"{name}, mean, {zoom}"] for name in toy_regression.NAMES]
        assert torch.allclose(means[0], means[1], rtol=1e-4, atol=1e-4)
        assert torch.equal(means[1], means[2])
        base, extended = (unit.arrays[f"{name}, std, {zoom}"] for name in ("BNN", "BNN-RGPR"))
        assert bool((extended >= base).all())
    assert all(claim.holds for claim in toy_regression.render(out / "toy-regression").claims)


def test_pages_are_made_of_the_files_alone(out: Path, tmp_path: Path) -> None:
    """The same page comes of a copied folder, also by the report."""
    copy = tmp_path / "copy"
    shutil.copytree(out / "moons", copy / "moons")
    before = (copy / "moons" / "moons.md").read_text()
    (copy / "moons" / "moons.md").unlink()
    (copy / "moons" / "moons.png").unlink()
    assert main(["paper", "report", "--out", str(copy)]) == 0
    assert (copy / "moons" / "moons.md").read_text() == before
    assert (copy / "moons" / "moons.png").read_bytes() == (out / "moons" / "moons.png").read_bytes()
    assert (copy / "moons" / "moons.svg").read_text() == (out / "moons" / "moons.svg").read_text()
