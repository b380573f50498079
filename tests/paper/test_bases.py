"""The small version of the experiment on bases."""

from __future__ import annotations

from pathlib import Path

import pytest

from rgpr.cli import main
from rgpr_paper.experiments import bases
from rgpr_paper.posterior_table import REGRESSORS
from rgpr_paper.section import Table
from rgpr_paper.units import read_units


@pytest.mark.filterwarnings("ignore:the data prefer no variance")  # after so little training
def test_every_base_goes_to_one_in_so_many_classes(tmp_path: Path) -> None:
    assert main(["paper", "run", "bases", "--small", "--out", str(tmp_path)]) == 0
    (unit,) = read_units(tmp_path / "bases")
    rows = unit.result["rows"]
    assert [row["base"] for row in rows] == [name for name in bases.SMALL for _ in range(2)]
    for row in rows:
        if row["sigma2"]:
            assert row["confidence"][-1] <= 0.12, row["base"]
    assert [row["base"] for row in unit.result["bars"]] == [n for n in REGRESSORS for _ in range(2)]
    tables = [b for b in bases.render(tmp_path / "bases").blocks if isinstance(b, Table)]
    assert [len(table.rows) for table in tables] == [len(rows), 2 * len(REGRESSORS)]
