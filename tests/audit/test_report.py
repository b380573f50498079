"""The report is one file that says what was measured, with or without a script to help."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr.audit.charts import line_chart
from rgpr.audit.findings import made_outliers

VOID = {"meta", "link", "img", "input", "br", "line", "circle", "path"}


class Reader(HTMLParser):
    """Refuses tags that do not close, and keeps what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID or tag == "circle":
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "data") and value]

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def report() -> rgpr.audit.Report:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    x, y = torch.rand(400, 1, 10, 10), torch.arange(400) % 3
    model = rgpr.RGPR(network).fit(x[:200], y[:200], progress=False)
    model.calibrate(x[200:300], y[200:300], progress=False)
    odd = {"<b>far</b>": 40 * torch.rand(50, 1, 10, 10)}
    return rgpr.audit.audit(model, (x[300:], y[300:]), odd, title="A & B", command="rgpr audit x")


def test_everything_is_in_one_file(report: rgpr.audit.Report) -> None:
    reader = read(report.html)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in reader.loads)
    assert reader.tags.count("svg") == 3
    assert "http" not in re.sub(r"data:image/png;base64,[^\"]+", "", report.html)
    for words in (
        *("A &amp; B", "rgpr audit x", "&lt;b&gt;far&lt;/b&gt;", "shuffled", "uniform", "smoothed"),
        *("certified bound", "fpr95 OpenOOD", "strangest", "most ordinary", "held back"),
        *("200 inputs", "100 inputs with labels", "4:input", "torch", "bare network"),
    ):
        assert words in report.html, words
    assert reader.tags.count("img") == 24  # twelve of the test data, and of the outliers
    found = report.evaluation.detection["<b>far</b>"]["RGPR, score"]["auroc"]
    assert found == 1


def test_numbers_are_those_of_evaluate(report: rgpr.audit.Report) -> None:
    values = report.evaluation.answers["RGPR"]
    assert f"{values['nll']:.4g}" in report.html
    assert f"{100 * report.evaluation.alarms['false alarms']:.1f} %" in report.html


def test_saved_whole_or_not_at_all(report: rgpr.audit.Report, tmp_path: Path) -> None:
    path = report.save(tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == report.html
    assert list(tmp_path.iterdir()) == [path]


def test_in_a_browser(report: rgpr.audit.Report, tmp_path: Path) -> None:
    """From file://, without an error in the console, and with charts that have a size."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    measure = (
        "<script>document.title = [...document.querySelectorAll('svg path')].map("
        "(path) => Math.round(path.getTotalLength())).join(',') + ';' "
        "+ document.documentElement.scrollWidth + ';' + innerWidth;</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text(report.html.replace("</body>", measure), encoding="utf-8")
    for width in (1200, 500):
        done = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *("--enable-logging=stderr", f"--window-size={width},900"),
                *(f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        title = re.search(r"<title>(.*?)</title>", done.stdout)
        assert title is not None
        lengths, across, inside = title[1].split(";")
        assert sum(int(length) > 100 for length in lengths.split(",")) >= 5
        assert int(across) <= int(inside)  # nothing but tables scrolls sideways


def test_tables_ids_and_regressions() -> None:
    x = torch.randn(120, 5)
    with torch.no_grad():
        network = mlp(5, 1)
        y = network(x)
    model = rgpr.RGPR(network, likelihood="regression").fit(x[:60], y[:60], progress=False)
    html = rgpr.audit.audit(model, (x[60:], y[60:])).html
    read(html)
    assert "root mean squared error" in html
    assert "not calibrated" in html

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.hidden(self.words(ids)).relu().mean(1))

    ids = torch.randint(0, 9, (60, 4))
    told = rgpr.RGPR(Words(), input="words").fit([ids], progress=False)
    html = rgpr.audit.audit(told, (ids, torch.arange(60) % 3), {"others": ids.flip(1)}).html
    read(html)
    assert "no chart of confidence against distance" in html


@given(st.integers(0, 1000))
def test_charts_stay_in_their_box(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = [(float(10.0**a), float(b)) for a, b in rng.normal(size=(12, 2)) ** 2]
    points[3] = (points[3][0], float("nan"))
    chart = line_chart("k", ("title", "x", "y", ""), {"a": points}, log=True, marks={"m": 1e99})
    (line,) = chart.lines
    assert len(line.dots) == 11
    assert line.path.count("M") == 2  # a gap
    assert all(64 <= x <= 628 and 11.9 <= y <= 256 for x, y, _ in line.dots)
    assert chart.marks == []
    assert all(64 <= tick.at <= 628 for tick in chart.x_ticks)


def test_made_outliers_keep_their_values() -> None:
    x = torch.rand(20, 3, 12, 12)
    made = made_outliers(x)
    assert set(made) == {"shuffled", "uniform", "smoothed"}
    assert torch.equal(made["shuffled"].flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert all(each.shape == x.shape for each in made.values())
    assert set(made_outliers(torch.rand(20, 7))) == {"shuffled", "uniform"}
