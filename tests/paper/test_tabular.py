"""The small version of the experiment on tables, and the parts that its numbers rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rgpr.cli import main
from rgpr_paper.experiments import tabular
from rgpr_paper.tabular.rows import read_numbers, shifted_rows, split, strange
from rgpr_paper.units import gaps, read_units


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tabular")
    assert main(["paper", "run", "tabular", "--small", "--out", str(folder)]) == 0
    return folder


def test_small_run_measures_both_tasks(out: Path) -> None:
    units = {unit.name: unit for unit in read_units(out / "tabular")}
    assert sorted(units) == ["diabetes-seed0", "diabetes-seed1", "iris-seed0", "iris-seed1"]
    classes, numbers = units["iris-seed0"].result, units["diabetes-seed0"].result
    assert list(classes["kinds"]) == ["held-out class", "shuffled", "scaled", "noisy"]
    assert list(numbers["kinds"]) == ["shifted", "shuffled", "scaled", "noisy"]
    assert set(classes["kinds"]["noisy"]) - set(numbers["kinds"]["noisy"]) == {
        "confidence",
        "energy",
        "ViM",
    }
    # A row ten times as far out is hard to miss for whatever measures distances.
    for result in (classes, numbers):
        for detector in ("score", "LOF", "nearest rows"):
            assert result["kinds"]["scaled"][detector]["auroc"] > 0.95
    assert numbers["wider"]["10 x"] > numbers["wider"]["2 x"] >= 1


def test_page_shows_every_claim_and_the_pictures(out: Path) -> None:
    assert len(tabular.render(out / "tabular").claims) == 7
    page = (out / "tabular" / "tabular.md").read_text()
    assert "classification: FPR95 / OpenOOD's FPR95" in page
    assert "numbers of a small version" in page
    assert (out / "tabular" / "tabular.png").is_file()


def test_missing_tables_are_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "CLASSES", ())
    monkeypatch.setattr(tabular, "NUMBERS", ("housing",))
    assert main(["paper", "run", "tabular", "--out", str(tmp_path)]) == 1
    (missing,) = gaps(tmp_path / "tabular")
    assert missing.startswith("housing-seed0 and 4 more: UCI housing is missing")


def test_shifted_rows_are_the_largest_of_the_column_that_tells_most() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    x[:, 2] = (x[:, 2] > 0).float()  # tells much as well, and has no tenth that is largest
    y = x[:, 1:2].sin() + 3 * x[:, 2:3]
    column, away = shifted_rows(x, y)
    assert column == 1
    assert int(away.sum()) == 40
    assert x[away, 1].min() > x[~away, 1].max()


def test_parts_share_no_row_and_have_the_units_of_the_training_part() -> None:
    x, y = read_numbers(None, "diabetes")
    parts = split(x, y, seed=3)
    assert sum(parts.sizes) == len(x)
    rows = torch.cat([part[0] for part in (parts.train, parts.validation, parts.test)])
    assert len(rows.unique(dim=0)) == len(x.unique(dim=0))
    assert torch.allclose(parts.train[0].mean(0), torch.zeros(x.shape[1]), atol=1e-5)
    assert torch.allclose(parts.train[1].std(0), torch.ones(1), atol=1e-5)
    made = strange(parts.test[0], seed=0)
    test = parts.test[0]
    assert torch.allclose(made["shuffled"].sort(0).values, test.sort(0).values, atol=1e-5)
    assert float((made["noisy"] - test).std()) == pytest.approx(3, rel=0.05)
