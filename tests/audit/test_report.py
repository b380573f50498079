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
from rgpr.audit import Evaluation, tables
from rgpr.audit.charts import line_chart
from rgpr.audit.findings import made_outliers

VOID = {"meta", "link", "img", "input", "br", "wbr", "line", "circle", "path"}


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
            timeout=600,
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
    assert "widens its intervals" in html
    assert "lowers its confidence" not in html
    assert "without the noise of observations" in html
    assert "How wide are the intervals far away?" in html
    assert "--val" in html

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.hidden(self.words(ids)).relu().mean(1))

    ids = torch.randint(0, 9, (60, 4))
    told = rgpr.RGPR(Words(), input="words").fit([ids], progress=False)
    with pytest.warns(UserWarning, match="60 of the 60 test inputs are training inputs"):
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
    assert all(64 <= dot.x <= 628 and 29.9 <= dot.y <= 256 for dot in line.dots)
    assert chart.marks == []
    assert all(64 <= tick.at <= 628 for tick in chart.x_ticks)


def test_made_outliers_keep_their_values() -> None:
    x = torch.rand(20, 3, 12, 12)
    made = made_outliers(x)
    assert set(made) == {"shuffled", "uniform", "smoothed"}
    shuffled = made["shuffled"][1]
    assert torch.equal(shuffled.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert all(each.shape == x.shape for _, each in made.values())
    # Columns have units of their own, so their values stay in them.
    rows = torch.rand(20, 7) * 10.0 ** torch.arange(7)
    made = made_outliers(rows)
    assert set(made) == {"shuffled", "uniform"}
    assert torch.allclose(made["shuffled"][1].sort(0).values, rows.sort(0).values)
    assert bool((made["uniform"][1] <= rows.amax(0)).all())
    assert set(made_outliers(rows[:1])) == {"uniform"}


def words_of(html: str) -> str:
    """What a reader sees, with single spaces."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body).replace("&#39;", "'"))


def table(rows: int = 300) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, 8) * 10.0 ** torch.arange(8) + 3
    return x, torch.arange(rows) % 3


def tabular(x: Tensor, y: Tensor, val: slice = slice(100, 200)) -> rgpr.RGPR:
    torch.manual_seed(1)
    scaled = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    scaled(x[:100])
    model = rgpr.RGPR(scaled).fit(x[:100], y[:100], progress=False)
    model.calibrate(x[val], progress=False)
    return model


def test_warnings_and_the_verdict_are_in_the_report() -> None:
    x, y = table()
    # Beside each validation input lies one, so the verdict does not hang on the draw of a sample.
    clean = rgpr.audit.audit(tabular(x, y), (x[100:200] * (1 + 1e-5), y[100:200]), progress=False)
    assert clean.warnings == []
    assert "Read this first" not in clean.html
    assert "These test data look like the held-out data" in words_of(clean.html)
    other = rgpr.audit.audit(tabular(x, y), (4 * x[200:], y[200:]), progress=False)
    assert "Read this first" in other.html
    assert "These test data are probably not like the held-out data" in words_of(other.html)
    with pytest.warns(UserWarning, match="training inputs that fit saw"):
        model = tabular(x, y, slice(0, 100))
    said = rgpr.audit.audit(model, (x[200:], y[200:]), notes=["a <b>word</b>"], progress=False)
    assert "p-values and sets will not keep their promise" in said.html
    assert "A &lt;b&gt;word&lt;/b&gt;." in said.html
    assert len(said.warnings) == 2


def test_test_data_that_were_seen_before(tmp_path: Path) -> None:
    x, y = table()
    model = tabular(x, y)
    for rows, words in ((slice(50, 130), "training"), (slice(150, 250), "validation")):
        with pytest.warns(UserWarning, match=f"50 of the .* test inputs are {words}") as caught:
            found = rgpr.audit.audit(model, (x[rows], y[rows]), progress=False)
        assert any(f"test inputs are {words} inputs" in note for note in found.warnings)
        assert f"test inputs are {words} inputs" in found.html
        assert len(caught) == (
            2 if words == "training" else 1
        )  # 30 of the first were calibrated on
    # What was seen is saved with the model.
    model.save(tmp_path / "m.safetensors")
    network = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    loaded = rgpr.load(tmp_path / "m.safetensors", network)
    with pytest.warns(UserWarning, match="50 of the 100 test inputs are validation inputs"):
        rgpr.audit.audit(loaded, (x[150:250], y[150:250]), progress=False)


def test_rows_of_a_table_show_their_most_unusual_columns() -> None:
    pd = pytest.importorskip("pandas")
    x, y = table()
    names = [f"size{i}" for i in range(8)]
    frame = pd.DataFrame(x.double().numpy(), columns=names)
    model = rgpr.RGPR(nn.Sequential(nn.Linear(8, 3))).fit(frame[:200], y[:200], progress=False)
    odd = frame[200:].copy()
    odd["size2"] += 123456.0
    found = rgpr.audit.audit(model, (frame[200:], y[200:]), {"odd": odd}, classes=["a", "b", "<c>"])
    reader = read(found.html)
    assert "img" not in reader.tags
    first = found.html.split("odd, strangest")[1].split("<div><table>")[1]
    cells = re.findall(r"<td>(.*?)</td>", first)
    assert cells[0] == "size2"  # the column that was changed stands first
    assert 123000 < float(cells[1]) < 124500
    assert len([cell for cell in cells[:18] if cell in names]) == 6
    assert "&lt;c&gt;" in found.html
    assert "class 1" not in found.html


def test_pictures_are_of_images_alone() -> None:
    x, y = torch.rand(160, 64), torch.arange(160) % 3
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = rgpr.RGPR(flat).fit(x[:80], y[:80], progress=False)
    test = (x[80:], y[80:])
    assert "img" not in read(rgpr.audit.audit(model, test).html).tags
    assert read(rgpr.audit.audit(model, test, image=(8, 8)).html).tags.count("img") == 12
    square = rgpr.RGPR(flat).fit(x[:80].reshape(-1, 8, 8), y[:80], progress=False)
    html = rgpr.audit.audit(square, (x[80:].reshape(-1, 8, 8), y[80:])).html
    assert read(html).tags.count("img") == 12


def test_a_regression_says_how_far_off_it_may_be() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 5)
    network = nn.Linear(5, 1)
    y = network(x).detach() + torch.randn(400, 1)
    model = rgpr.RGPR(network, likelihood="regression").fit(x[:100], y[:100], progress=False)
    model.calibrate(x[100:300], y[100:300], progress=False)
    html = rgpr.audit.audit(model, (x[300:], y[300:])).html
    assert html.count("90 % interval: ") == 12
    low, high = re.findall(r"90 % interval: (\S+) to ([^<]+)<", html.replace("\u2212", "-"))[0]
    assert 2 < float(high) - float(low) < 6  # the noise has a deviation of one
    assert "\u00b1" not in html


def test_distances_and_not_their_cubes() -> None:
    x, y = table()
    model = tabular(x, y)
    far = x[200:] + 1e9 * torch.tensor([0.0] * 7 + [1.0])
    html = rgpr.audit.audit(model, (x[200:], y[200:]), {"far": far}, progress=False).html
    times = [float(each) for each in re.findall(r"([\d.]+) &times; as far as usual", html)]
    strangeness = model.explain(far).strangeness.amax() ** (1 / 3)
    assert max(times) == pytest.approx(float(strangeness), rel=0.05)


def test_the_card_is_about_the_users_own_sets() -> None:
    x, y = table()
    model = tabular(x, y)
    made = words_of(rgpr.audit.audit(model, (x[200:], y[200:]), progress=False).html)
    assert "sets made from your test data" in made
    assert made.count("Made from your test data.") == 2
    own = {"easy": 1e6 * x[200:], "hard": 1.01 * x[200:], "uniform": 1e6 * x[200:]}
    html = words_of(rgpr.audit.audit(model, (x[200:], y[200:]), own, progress=False).html)
    assert "of 'hard', the hardest of your 3 sets, are flagged" in html
    assert html.count("Made from your test data.") == 1  # 'uniform' is the user's


def test_one_colour_for_each_method_and_dots_with_counts() -> None:
    points = [(0.2, 0.3), (0.9, 0.8)]
    words = ("title", "x", "y", "")
    two = line_chart("k", words, {"network": points, "RGPR": points, "honest": points})
    three = line_chart("k", words, {"network": points, "base": points, "RGPR": points})
    colours = [{line.name: line.colour for line in chart.lines} for chart in (two, three)]
    assert colours[0]["RGPR"] == colours[1]["RGPR"]
    assert all(len(set(each.values())) == 3 for each in colours)
    chart = line_chart("k", words, {"RGPR": points}, counts={"RGPR": [10.0, 40.0]})
    small, large = chart.lines[0].dots
    assert large.radius == 2 * small.radius
    assert "40 answers" in large.says
    grows = line_chart("k", words, {"RGPR": [(1.0, 0.0), (2.0, 0.3), (3.0, 500.0)]}, log_y=True)
    assert len(grows.lines[0].dots) == 2
    assert {"0.1", "1e3"} <= {tick.label for tick in grows.y_ticks}


def test_words_where_there_is_nothing_to_draw_or_to_promise() -> None:
    x, y = table()
    model = tabular(x, y, slice(100, 160))
    right = model(x[200:]).argmax(1)
    report = rgpr.audit.audit(model, (x[200:], right), progress=False)
    assert "There are no errors among the 100 test inputs" in report.html
    assert 'id="chart-risk"' in report.html
    assert read(report.html).tags.count("svg") == 2
    assert "A level of 1 % takes at least 99 validation inputs, and there are 60." in report.html
    assert "the network itself" in report.html
    assert "<h1>Network</h1>" in report.html


def test_the_better_value_is_bold() -> None:
    def grades(ours: float, other: float) -> dict[str, dict[str, float]]:
        return {
            "network": {"nll": other, "accuracy": other},
            "RGPR": {"nll": ours, "accuracy": ours},
        }

    for ours, other in ((0.2, 0.1), (0.1, 0.2)):
        found = Evaluation(grades(ours, other), {}, {}, {}, {}, {}, {"test": 1}, {})
        told = tables.answers(found)
        assert told.head == ["test data", "RGPR", "network"]
        (_, nll), (_, accuracy) = told.rows
        assert [cell.best for cell in nll] == [ours < other, other < ours]
        assert [cell.best for cell in accuracy] == [ours > other, other > ours]
    same = Evaluation(grades(0.1, 0.1), {}, {}, {}, {}, {}, {"test": 1}, {})
    assert not any(cell.best for _, cells in tables.answers(same).rows for cell in cells)


def test_a_report_is_named_as_what_it_is(report: rgpr.audit.Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html or \.htm"):
        report.save(tmp_path / "r.pdf")
    assert list(tmp_path.iterdir()) == []
