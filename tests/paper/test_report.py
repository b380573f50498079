from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rgpr.cli import main
from rgpr_paper import all_experiments, experiment
from rgpr_paper.context import Context
from rgpr_paper.report import _table_html, block_markdown, write_report
from rgpr_paper.section import Claim, Section, Table, Text, beside, printed, provenance, spread
from rgpr_paper.units import Unit, run_units


class Tags(HTMLParser):
    """Every tag that is opened is closed, but for those that have no end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_page_with_everything_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "run", "construction", "--small", "--out", str(tmp_path)]) == 0
    assert main(["paper", "report", "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert page.count("data:image/png;base64,") == 2
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "prefers-color-scheme: dark" in page
    text = (tmp_path / "report.md").read_text()
    assert "(construction/construction.png)" in text
    assert (
        "| The kernel as the limit of ReLU features | fig:double_cubicspline_gps | run, small |"
        in text
    )
    for name, listed in all_experiments().items():
        assert listed.title in text
        assert f'id="{name}"' in page
        if name != "construction":
            assert f"not run: `rgpr paper run {name} --out" in text


def test_without_a_folder_it_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "report", "--out", str(tmp_path / "none")]) == 1
    assert "run an experiment first" in capsys.readouterr().err


def test_all_runs_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two experiments for all of them: one whose data are missing, and one that needs none."""
    chosen = {name: all_experiments()[name] for name in ("uci", "construction")}
    monkeypatch.setattr(experiment, "_REGISTERED", chosen)
    assert main(["paper", "run", "all", "--out", str(tmp_path)]) == 0
    assert "uci, energy-trial0 and 9 more: UCI energy is missing" in capsys.readouterr().err
    assert (tmp_path / "construction" / "construction.png").exists()
    write_report(tmp_path)
    assert "**Gap.** energy-trial0 and 9 more: UCI energy" in (tmp_path / "report.md").read_text()


def test_cells() -> None:
    assert spread([0.1, 0.3], 1, 100) == "20.0 ± 14.1"
    assert spread([2.0], 3) == "2.000"
    assert spread([None, 2.0], 3) == "inf"
    assert spread([], 3) == "-"
    assert beside("1.0", 2.5) == "1.0 (paper: 2.5)"
    assert beside("1.0", None) == "1.0"
    assert printed("ood_avg", **{"in": "MNIST"}, method="nobody", metric="FPR95") is None
    with pytest.raises(ValueError, match="does not fit the head"):
        Table(["a", "b"], [["1"]])


def test_blocks() -> None:
    table = Table(["a|b", "<c>"], [["1 (paper: 2)", "`x` & y"]], "Title")
    assert block_markdown(table, "")[1].splitlines()[0] == "| a/b | <c> |"
    page = _table_html(table)
    assert '1 <span class="paper">(paper: 2)</span>' in page
    assert "<code>x</code> &amp; y" in page
    assert "&lt;c&gt;" in page
    assert block_markdown(Text("rgpr", code=True), "") == ["    rgpr"]


def test_a_claim_that_does_not_hold_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_units(Context(tmp_path), "construction", {"functions": lambda: {"value": 1}})

    def render(folder: Path) -> Section:
        return Section([Text("shown")], [Claim("a claim", "0.5", False, "because")])

    other = replace(all_experiments()["construction"], render=render)
    monkeypatch.setitem(experiment._REGISTERED, "construction", other)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| a claim | 0.5 | does not hold | because |" in text
    assert "0 of 1 hold" in text
    assert '<span class="no">does not hold</span>' in (tmp_path / "report.html").read_text()


def test_where_units_come_from() -> None:
    about = {"date": "2026-01-01", "hardware": "CPU", "versions": {"torch": "2"}, "command": "c"}
    about["commit"] = "0123456789ab"
    units = [Unit(str(i), {"small": i == 1}, about, {}, {}) for i in range(2)]
    blocks = provenance(units)
    assert blocks[:2] == [
        Text("Made on 2026-01-01 on CPU; torch 2; commit 0123456789ab; by"),
        Text("c", code=True),
    ]
    assert len(blocks) == 3
    (before, *_) = provenance([Unit("0", {"small": False}, about | {"commit": None}, {}, {})])
    assert before == Text("Made on 2026-01-01 on CPU; torch 2; an unknown commit; by")
