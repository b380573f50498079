"""Small versions of the experiments on images: digits, one seed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from rgpr.cli import main
from rgpr.metrics import accuracy
from rgpr_paper import all_experiments, shift
from rgpr_paper.comparison import by_set, over_seeds, remarks
from rgpr_paper.context import Context
from rgpr_paper.data import ImageSet, read_split
from rgpr_paper.experiments import corrupted_cifar10, far_away, far_away_noise, rotated_mnist
from rgpr_paper.methods import contestants
from rgpr_paper.section import Section
from rgpr_paper.units import Unit, read_units

NAMES = (
    "far-away",
    "far-away-noise",
    "rotated-mnist",
    "corrupted-cifar10",
    "non-bayesian",
    "optimal-scales",
    "natural-images",
)


@pytest.fixture(scope="module")
def out(run_small: Callable[[Iterable[str]], Path]) -> Path:
    return run_small(NAMES)


def shown(out: Path, name: str) -> tuple[list[Unit], Section, str]:
    folder = out / name
    section = all_experiments()[name].render(folder)
    return read_units(folder), section, (folder / f"{name}.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_hold_is_discussed(out: Path, name: str) -> None:
    _, section, page = shown(out, name)
    assert section.claims
    assert all(claim.holds or claim.discussion for claim in section.claims)
    assert "digits is a stand-in" in page
    assert f"rgpr paper run {name} --small" in page


def test_far_away(out: Path) -> None:
    (unit,), section, page = shown(out, "far-away")
    assert all(claim.holds for claim in section.claims if "small alpha" not in claim.statement)
    assert "(far-away.png)" in page
    for method in far_away.METHODS:
        curve = unit.arrays[f"{method}, mean"]
        assert curve.shape == unit.arrays[f"{method}, std"].shape == (len(far_away.ALPHAS),)
        assert bool(((curve >= 0.1 - 1e-6) & (curve <= 1 + 1e-6)).all())
    base, extended = (unit.arrays[f"{m}, mean"] for m in ("LLL", "LLL-RGPR-OOD"))
    assert float(base[-1]) > 0.5
    assert float(extended[-1]) == pytest.approx(0.1, abs=0.001)


def test_far_away_noise(out: Path) -> None:
    (unit,), _, page = shown(out, "far-away-noise")
    found = unit.result["methods"]
    assert tuple(found) == far_away_noise.METHODS
    for base in far_away_noise.BASES:
        for measured in (found[f"{base}{residual}"] for residual in far_away_noise.RESIDUALS):
            assert measured["accuracy"] > 0.85
        assert found[base]["variance"] == 0 < found[f"{base}-RGPR"]["variance"]
        # Ten votes far away: no fewer than one in ten when spread evenly, more when not.
        assert found[f"{base}-RGPR-untuned"]["even"] == pytest.approx(0.1, abs=0.01)
        assert 0.24 < found[f"{base}-RGPR-untuned"]["independent"] < 0.31
    assert found["KFL"]["independent"] > 0.5
    for base in (*far_away_noise.BASES, "LLL"):
        assert found[f"{base}-RGPR-onset"]["even"] == pytest.approx(0.1, abs=0.02)
        assert f"| → {base}-RGPR-onset |" in page
    assert "| KFL-RGPR |" in page
    assert "An arrow marks this library's default" in page


def test_units_of_before_have_no_rows_of_the_default_residual(out: Path, tmp_path: Path) -> None:
    """Rows and claims of methods that a stored unit lacks are left out, and nothing else is."""
    for name, others in (("far-away-noise", ("LLL",)), ("natural-images", ("LLL-RGPR-score",))):
        folder = tmp_path / name
        shutil.copytree(out / name, folder)
        before = all_experiments()[name].render(folder)
        for path in folder.glob("*.json"):
            content = json.loads(path.read_text())
            found = content["result"]["methods"]
            for method in [m for m in found if m.endswith("-RGPR-onset") or m in others]:
                del found[method]
            path.write_text(json.dumps(content))
        after = all_experiments()[name].render(folder)
        rows = [row for block in after.blocks for row in getattr(block, "rows", ())]
        all_rows = [row for block in before.blocks for row in getattr(block, "rows", ())]
        kept = [r for r in all_rows if not r[0].startswith("→ ") and r[0] not in others]
        assert rows == kept
        new = [c for c in before.claims if c not in after.claims]
        assert [c for c in before.claims if c not in new] == after.claims
        assert all("default residual" in c.statement or "no outlier" in c.statement for c in new)
        assert new
        assert not any("arrow" in getattr(block, "text", "") for block in after.blocks)


def test_ten_independent_votes_are_those_of_a_die(out: Path) -> None:
    """The number that the section names: the winner's share of ten votes over ten classes."""
    votes = torch.randint(10, (20_000, 10), generator=torch.Generator().manual_seed(0))
    share = torch.nn.functional.one_hot(votes, 10).double().mean(1).amax(1).mean()
    assert float(share) == pytest.approx(0.275, abs=0.003)
    assert "27.5 % over ten classes" in shown(out, "far-away-noise")[2]


@pytest.mark.parametrize("quarters", [0, 1, 2])
def test_rotation_by_quarters_moves_pixels(quarters: int) -> None:
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    turned = rotated_mnist.rotate(images, 90 * quarters)
    assert torch.allclose(turned, images.rot90(quarters, (2, 3)), atol=1e-5)


def test_rotated(out: Path) -> None:
    units, _, page = shown(out, "rotated-mnist")
    assert [unit.result["angle"] for unit in units] == [0, 30, 180]
    for unit in units:
        assert unit.result["images"] == 432
        assert list(unit.result["methods"]) == list(shift.METHODS)
        for (found,) in unit.result["methods"].values():
            assert set(found) == set(shift.METRICS)
    context = Context(out, small=True, seeds=(0,))
    competing = contestants(context, "digits", 0)
    assert competing.test.y is not None
    with torch.no_grad():
        p = torch.cat([competing.method("MAP").predict(x) for x, _ in competing.test])
    clean = units[0].result["methods"]["MAP"][0]
    assert clean["accuracy"] == pytest.approx(accuracy(p, competing.test.y))
    assert units[1].result["methods"]["MAP"][0]["accuracy"] < clean["accuracy"] - 0.1
    assert "(rotated.png)" in page


def test_one_pass_predicts_what_each_method_does(out: Path) -> None:
    context = Context(out, small=True, seeds=(0,))
    competing = contestants(context, "digits", 0)
    images = competing.test.x[:200]
    (found,) = shift.predictions(context, "digits", images)
    assert tuple(found) == shift.METHODS
    x = images.float() / 255
    for method in competing.methods(shift.METHODS):
        with torch.no_grad():
            p = method.predict(x)
        assert torch.allclose(found[method.name].float(), p, atol=1e-5), method.name


def test_images_that_no_seed_was_validated_on(out: Path) -> None:
    context = Context(out, small=True, seeds=(0, 1))
    rows = shift.images_of_all(context, "digits").tolist()
    _, test = read_split(None, "digits")
    each = [set(contestants(context, "digits", seed).test_rows.tolist()) for seed in (0, 1)]
    assert set(rows) == each[0] & each[1]
    assert len(rows) == len(set(rows)) < len(each[0]) < len(test.x)


def test_corrupted(out: Path) -> None:
    units, _, page = shown(out, "corrupted-cifar10")
    assert {unit.name for unit in units} == set(corrupted_cifar10.SMALL_KINDS)
    for unit in units:
        assert unit.result["source"] == corrupted_cifar10.OURS
        for (found,) in unit.result["methods"].values():
            assert all(len(found[metric]) == 5 for metric in shift.METRICS)
    (contrast,) = (unit.result["methods"]["MAP"][0] for unit in units if unit.name == "contrast")
    assert contrast["accuracy"][4] < contrast["accuracy"][0]
    assert "CIFAR-10-C.tar" in page
    assert page.count("| contrast |") == len(shift.METRICS)
    for picture in ("bars", "severities"):
        assert (out / "corrupted-cifar10" / f"{picture}.png").exists()


def test_published_corruptions_are_taken_where_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 30)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", labels)
    test = ImageSet("CIFAR10", torch.zeros(30, 3, 32, 32).byte(), torch.from_numpy(labels))
    rows, context = torch.tensor([4, 2]), Context(tmp_path, data=tmp_path)
    found, source = corrupted_cifar10._corrupted(context, test, rows, "fog", 1)
    assert source == corrupted_cifar10.PUBLISHED
    assert torch.equal(found, torch.from_numpy(images[[4, 2]]).permute(0, 3, 1, 2))
    found, source = corrupted_cifar10._corrupted(context, test, rows, "contrast", 1)
    assert (source, tuple(found.shape)) == (corrupted_cifar10.OURS, (2, 3, 32, 32))
    other = ImageSet("CIFAR10", test.x, test.y.flip(0))
    with pytest.raises(ValueError, match="in another order"):
        corrupted_cifar10._corrupted(context, other, rows, "fog", 1)


def test_non_bayesian(out: Path) -> None:
    (unit,), _, page = shown(out, "non-bayesian")
    assert unit.result["outliers"] == ["inverted", "mirrored", "UniformNoise"]
    assert "accuracy" not in unit.result["methods"]["Mahalanobis, all stages"]
    assert "| DUQ, lambda 0.5, quoted | 93.2 | 92.7 |" in page


def test_optimal_scales(out: Path) -> None:
    (unit,), _, page = shown(out, "optimal-scales")
    for tuning in unit.result["tuning"].values():
        assert list(tuning["sigma2"]) == ["input", "pool1", "pool2", "relu3"]
        assert tuning["sigma2"]["input"] > 0
    assert "| LLL-RGPR-OOD-natural, digits |" in page
    # The likelihood of digits has no use for variance, and the table says so.
    assert re.search(r"\| LLL-RGPR-LL, digits \| held at [0-9.e-]+ \| 0 \| 0 \| 0 \| - \|", page)


def test_natural_images(out: Path) -> None:
    (unit,), _, page = shown(out, "natural-images")
    # Digits have no natural images: the noise stands for them.
    noise, natural = (unit.result["methods"][f"LLL-RGPR-OOD{kind}"] for kind in ("", "-natural"))
    assert noise["fpr95"] == natural["fpr95"]
    assert page.count("| LLL-RGPR-LL |") == 2
    assert page.count("| → LLL-RGPR-onset |") == 2
    assert page.count("| → LLL-RGPR-score |") == 1


def test_natural_images_that_are_missing(tmp_path: Path) -> None:
    """Other tunings are kept; the section says what is missing."""
    rng = np.random.default_rng(0)
    parts = {
        f"x_{part}": rng.integers(0, 256, (60, 28, 28), np.uint8) for part in ("train", "test")
    }
    labels = {f"y_{part}": np.arange(60) % 10 for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **parts, **labels)
    options = ["--small", "--sets", "mnist", "--seeds", "0", "--data", str(tmp_path)]
    assert main(["paper", "run", "optimal-scales", *options, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "optimal-scales" / "optimal-scales.md").read_text()
    assert "(paper: 3.4e-08)" in page
    assert "| LLL-RGPR-OOD-natural" not in page
    assert "ImageNet32 (train) is missing" in page


def test_sets_come_in_the_papers_order() -> None:
    units = [Unit(name, {}, {}, {"set": name, "a": {"b": 1}}, {}) for name in ("cifar10", "mnist")]
    assert list(by_set(units)) == ["mnist", "cifar10"]
    assert over_seeds(units, "a", "b") == [1, 1]
    assert over_seeds(units, "a", "c") == []
    assert "tab:acc_ece" in remarks("acc_ece")[0].text  # type: ignore[union-attr]
