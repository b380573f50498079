from __future__ import annotations

from pathlib import Path

import pytest

from rgpr.cli import main
from rgpr_paper.experiments import tuning
from rgpr_paper.units import read_units


@pytest.mark.filterwarnings("ignore")
def test_the_figure_and_the_table(tmp_path: Path) -> None:
    assert main(["paper", "run", "tuning", "--small", "--out", str(tmp_path / "new")]) == 0
    folder = tmp_path / "new" / "tuning"
    assert (folder / "tuning.png").read_bytes().startswith(b"\x89PNG")
    table, maps = read_units(folder)
    rows = table.result["rows"]
    assert len(rows) == 10
    # Confidence at ten times the data: less after tuning for outliers than after the likelihood.
    assert rows["L_OOD"]["confidence"]["10 x"] < rows["L_LL"]["confidence"]["10 x"]
    assert rows["base alone"]["seconds"] is None
    page = (folder / "tuning.md").read_text()
    assert all(f"| {name} |" in page for name in rows)
    assert set(maps.result["sigma2"]) == {"untuned", *tuning.OBJECTIVES}
    assert all(claim.holds for claim in tuning.render(folder).claims)


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list"]) == 0
    assert "tuning" in capsys.readouterr().out
    assert main(["paper", "run", "nothing"]) == 2
    assert "no experiment 'nothing'" in capsys.readouterr().err
