"""Small versions of the experiments that are not the paper's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rgpr.cli import main
from rgpr_paper.experiments import small_data, two_answers
from rgpr_paper.units import read_units


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    for name in ("two-answers", "small-data"):
        options = ["--small", "--seeds", "0", "1", "--out", str(folder)]
        assert main(["paper", "run", name, *options]) == 0
    return folder


def test_two_answers(out: Path) -> None:
    first = read_units(out / "two-answers")[0]
    stages = first.result["at data"]
    assert stages["calibrated"]["nll"] <= stages["base"]["nll"] + 0.02
    assert stages["calibrated"]["wrong above 0.9"] <= stages["base"]["wrong above 0.9"]
    found = first.result["outliers"]
    assert found["score"]["far"]["auroc"]["mean"] > 0.99
    assert (
        found["score"]["near"]["auroc"]["mean"] > found["confidence, base"]["near"]["auroc"]["mean"]
    )
    assert re.fullmatch("[0-9a-f]{12,}", first.about["commit"])
    assert isinstance(first.about["clean"], bool)
    page = (out / "two-answers" / "two-answers.md").read_text()
    assert "| digits, near: FPR95 / AUROC | mirrored | mean |" in page
    assert len(two_answers.summary(out / "two-answers").rows) == 1


def test_small_data(out: Path) -> None:
    units = read_units(out / "small-data")
    assert [unit.name for unit in units] == ["iris-seed0", "iris-seed1"]
    for unit in units:
        assert list(unit.result["cells"]) == ["30", "50"]
        for cell in unit.result["cells"].values():
            assert cell["fitted"]["10 x"] < cell["base"]["10 x"]
    section = small_data.render(out / "small-data")
    assert len(section.claims) == 8
    page = (out / "small-data" / "small-data.md").read_text()
    assert "| iris, 300 | - |" in page
