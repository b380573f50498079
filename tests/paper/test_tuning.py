from __future__ import annotations

from pathlib import Path

import pytest

from rgpr.cli import main


@pytest.mark.filterwarnings("ignore")
def test_the_figure_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "run", "tuning", "--small", "--out", str(tmp_path / "new")]) == 0
    picture, table = tmp_path / "new" / "tuning.png", tmp_path / "new" / "tuning.md"
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines()[2:]]
    assert len(rows) == 9
    assert all(len(row) == 9 for row in rows)
    by_name = {row[0].strip(): row for row in rows}
    # Confidence at ten times the data: less after tuning for outliers than after the likelihood.
    assert float(by_name["L_OOD"][6]) < float(by_name["L_LL"][6])
    assert table.read_text().strip() in capsys.readouterr().out


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list"]) == 0
    assert "tuning" in capsys.readouterr().out
    assert main(["paper", "run", "nothing"]) == 2
    assert "no experiment 'nothing'" in capsys.readouterr().err
