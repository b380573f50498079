"""The transcription against the paper's LaTeX, and against itself where the LaTeX is absent.

``RGPR_PAPER=.../rgpr.tex pytest tests/paper/test_published.py`` reads the source.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from rgpr_paper.published import published, published_names

Cell = dict[str, Any]

FIGURE = "rotated_mnist"
TABLES = [name for name in published_names() if name != FIGURE]

needs_source = pytest.mark.skipif(
    "RGPR_PAPER" not in os.environ, reason="RGPR_PAPER names no file with the paper's source"
)


# --- The paper's LaTeX -----------------------------------------------------------------------

# The paper's name in a table: the name in every file.
NAMES = {
    "Temp.": "TS",
    "Temp. Scaling": "TS",
    "Deep Ens.": "DE",
    "Acc.": "accuracy",
    "Test Acc.": "accuracy",
    "Accuracy": "accuracy",
    "Confidence": "confidence",
    "FPR": "FPR95",
    "FPR@95": "FPR95",
    "In": "inliers",
    "Out": "outliers",
    "DUQ (lambda = 0)": "DUQ, lambda 0",
    "DUQ (lambda = 0.5)": "DUQ, lambda 0.5",
    "LL": "LLL-RGPR-LL",
    "OOD (Synthetic)": "LLL-RGPR-OOD",
    "OOD (32x32 ImageNet)": "LLL-RGPR-OOD ImageNet",
}

# Where each axis stands: in the row's name, in the heading over a block of rows ("section"), in
# the column's heading ("column", and "top" for the line above it); anything else is the place.
LAYOUTS = {
    "ood_faraway": {"in": "column", "method": "row", "metric": "confidence"},
    "cifar10c": {"method": "row", "metric": "column"},
    "ood_non_bayesian": {"in": "", "out": "", "against": "", "method": "row", "metric": ""},
    "calib_ood": {"in": "column", "method": "row", "metric": "ECE"},
    "acc_ece": {"in": "column", "method": "row", "metric": "section"},
    "ood_avg": {"in": "column", "method": "row", "metric": "FPR95"},
    "ood_hyperopt": {"in": "section", "out": "row", "method": "top", "metric": "column"},
    "ood_auroc_auprc": {"in": "section", "out": "row", "method": "top", "metric": "column"},
    "opt_hyperparams": {"in": "row", "layer": "column", "method": "section", "metric": "sigma2"},
    "ood_imagenet": {"in": "column", "method": "row", "metric": "section"},
    "ood_reg_faraway": {"in": "top", "method": "row", "metric": "column"},
}
METHODS = ["MAP", "TS", "DE", "GP-DSCS", "LLL", "LLL-RGPR-LL", "LLL-RGPR-OOD"]
NUMBER = r"\d+\.\d+(?:e[+-]\d+)?"


def tabulars(source: str, label: str) -> list[str]:
    """The bodies of the tabulars that follow a label, up to the end of its table."""
    start = source.index(rf"\label{{{label}}}")
    end = re.compile(r"\\end\{(wrap)?table\*?\}").search(source, start)
    assert end is not None
    bodies = re.findall(
        r"\\begin\{tabular\}\{[^}]*\}(.*?)\\end\{tabular\}", source[start : end.start()], re.DOTALL
    )
    return [re.sub(r"\\(toprule|midrule|bottomrule|cmidrule\S*\{\S*\})", "", b) for b in bodies]


def plain(text: str) -> str:
    """A heading without its LaTeX, under the name that the files use."""
    text = re.sub(r"\$\\(down|up)arrow\$|\\textbf|\\bf\b|\\text\b|\\L_|[{}$\\]", "", text)
    text = " ".join(text.split())
    return NAMES.get(text, text)


def spread(line: str) -> list[str]:
    """The cells of a line, one that spans several columns repeated."""
    cells: list[str] = []
    for cell in line.split("&"):
        spans = re.search(r"\\multicolumn\{(\d)\}\{[^}]*\}(.*)", cell.strip())
        cells += [spans[2]] * int(spans[1]) if spans else [cell.strip()]
    return cells


def number(text: str) -> Cell | None:
    """Value, error and boldness; None for a dash or a heading."""
    match = re.fullmatch(rf"(\\textbf)?\{{?({NUMBER})\}}?(?:\$\\pm\$({NUMBER}))?", text)
    if match is None:
        return None
    bold, value, error = match.groups()
    return {
        "value": float(value),
        "error": None if error is None else float(error),
        "bold": bold is not None,
    }


def parsed_tabular(body: str, layout: dict[str, str]) -> list[Cell]:
    cells = []
    headings: list[list[str]] = []
    section = ""
    for line in re.split(r"\\\\", body):
        row, *rest = spread(line)
        if not "".join([row, *rest]):
            continue
        if not rest:
            section = plain(row)
        elif not any(text == "-" or number(text) for text in rest):
            headings.append([plain(text) for text in rest])
        else:
            if r"\textbf" in row:
                section = plain(row)  # a block's heading with numbers: the set trained on
            for column, text in enumerate(rest):
                found = number(text)
                assert found or text == "-", text
                where = {
                    "section": section,
                    "row": plain(row),
                    "column": headings[-1][column],
                    "top": headings[0][column],
                }
                if found:
                    cells.append({axis: where.get(at, at) for axis, at in layout.items()} | found)
    return cells


def parsed_table(source: str, name: str) -> list[Cell]:
    bodies = tabulars(source, f"tab:{name}")
    if name != "ood_non_bayesian":
        (body,) = bodies
        return parsed_tabular(body, LAYOUTS[name])
    cells = []
    for body, against in zip(bodies, ("Mahalanobis", "DUQ"), strict=True):
        for cell in parsed_tabular(body, {"method": "row", "heading": "column"}):
            heading = cell.pop("heading")
            trained, _, out = heading.partition(" vs. ")
            where = {
                "in": trained if out else "CIFAR10",
                "out": out or "CIFAR10",
                "against": against,
                "metric": "AUROC" if out else heading,
            }
            cells.append(where | cell)
    return cells


def parsed_figure(source: str) -> list[Cell]:
    bands = re.findall(r"\\path \[draw=white.*?--cycle;", source, re.DOTALL)
    curves = re.findall(r"\\addplot .*?table \{%\n(.*?)\};", source, re.DOTALL)
    cells = []
    for method, band, curve in zip(METHODS, bands, curves, strict=True):
        points = [
            (int(x), float(y)) for x, y in re.findall(r"axis cs:(\d+),([\d.]+)", band)
        ]  # there along the lower edge, back along the upper; the first and last point twice
        lower, upper = dict(points[1:14]), dict(points[15:])
        assert len(points) == 28
        assert list(upper) == list(lower)[::-1]
        for angle, value in (line.split() for line in curve.splitlines()):
            low, high, centre = lower[int(angle)], upper[int(angle)], float(value)
            assert (low + high) / 2 == pytest.approx(centre, abs=1e-9)
            cells.append(
                {
                    "method": method,
                    "angle": int(angle),
                    "metric": "accuracy",
                    "value": centre,
                    "error": round((high - low) / 2, 12),
                    "bold": False,
                }
            )
    return cells


# --- With the source -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> str:
    text = Path(os.environ["RGPR_PAPER"]).read_text(encoding="utf-8")
    return re.sub(r"(?<!\\)%[^\n]*(?=\n)", "%", text)


@needs_source
@pytest.mark.parametrize("name", published_names())
def test_every_cell_is_the_paper_s(source: str, name: str) -> None:
    theirs = parsed_figure(source) if name == FIGURE else parsed_table(source, name)
    axes = list(published(name)["axes"])
    assert by_place(published(name)["cells"], axes) == by_place(theirs, axes)


@needs_source
@pytest.mark.parametrize("name", TABLES)
def test_no_printed_number_is_left_out_or_added(source: str, name: str) -> None:
    """Independent of how a table is read: the decimals in it, however they are arranged."""
    text = re.sub(r"\$\\lambda[^$]*\$", "", "".join(tabulars(source, published(name)["label"])))
    ours = [cell[key] for cell in published(name)["cells"] for key in ("value", "error")]
    assert Counter(map(float, re.findall(NUMBER, text))) == Counter(
        number for number in ours if number is not None
    )


@needs_source
def test_every_table_and_every_plot_has_a_file(source: str) -> None:
    labels = re.findall(r"\\label\{(tab:\w+)\}", source)
    assert sorted(labels) == sorted(published(name)["label"] for name in TABLES)
    assert sum(len(tabulars(source, label)) for label in labels) == source.count(r"\begin{tabular}")
    assert source.count(r"\addplot") == len(published(FIGURE)["axes"]["method"])
    assert source.count(r"\begin{axis}") == 1
    assert rf"\label{{{published(FIGURE)['label']}}}" in source


@needs_source
@pytest.mark.parametrize("name", TABLES)
def test_runs_and_kind_of_error_are_those_of_the_caption(source: str, name: str) -> None:
    table = published(name)
    end = source.index(rf"\label{{{table['label']}}}")
    caption = source[source.rindex(r"\caption", 0, end) : end]
    said = re.search(r"(\w+) prediction (?:runs|trials)", caption)
    words = {"three": 3, "ten": 10}
    assert table["runs"] == (None if said is None else words.get(said[1]) or int(said[1]))
    assert table["error"] == ("standard error" if "standard error" in caption else None)


# --- Without the source ----------------------------------------------------------------------


def by_place(cells: list[Cell], axes: list[str]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Cells by their place on the axes, each place once."""
    found = {
        tuple(cell[axis] for axis in axes): (cell["value"], cell["error"], cell["bold"])
        for cell in cells
    }
    assert len(found) == len(cells)
    return found


def value(name: str, **place: Any) -> float:
    """The value of the one cell at a place."""
    (cell,) = [cell for cell in published(name)["cells"] if place.items() <= cell.items()]
    return float(cell["value"])


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no numbers named 'ood'; there are acc_ece, .*ood_avg"):
        published("ood")


@pytest.mark.parametrize("name", published_names())
def test_form(name: str) -> None:
    table = published(name)
    assert list(table) == [
        "label", "kind", "title", "caption", "runs", "error", "remarks",
        "rows", "columns", "axes", "metrics", "cells",
    ]  # fmt: skip
    assert table["kind"] == ("figure" if name == FIGURE else "table")
    assert table["label"] == ("fig:dataset_shift" if name == FIGURE else f"tab:{name}")
    assert table["title"]
    assert table["caption"]
    assert all(isinstance(remark, str) and remark.endswith(".") for remark in table["remarks"])
    assert table["runs"] is None or table["runs"] > 1
    axes = table["axes"]
    assert sorted(table["rows"] + table["columns"]) == sorted(axes)
    assert list(table["metrics"]) == axes["metric"]
    for axis, places in axes.items():
        assert list(dict.fromkeys(cell[axis] for cell in table["cells"])) == places
    for cell in table["cells"]:
        assert list(cell) == [*axes, "value", "error", "bold"]
    assert (table["error"] is None) == all(cell["error"] is None for cell in table["cells"])
    by_place(table["cells"], list(axes))


@pytest.mark.parametrize("name", published_names())
def test_values_fit_their_units(name: str) -> None:
    table = published(name)
    most = {"percent": 100, "fraction": 1}
    for metric in table["metrics"].values():
        assert set(metric) == {"unit", "better", "decimals"}
        assert metric["better"] in ("lower", "higher", None)
    for cell in table["cells"]:
        metric = table["metrics"][cell["metric"]]
        assert 0 <= cell["value"] <= most.get(metric["unit"], float("inf"))
        assert cell["error"] is None or 0 <= cell["error"] <= cell["value"]
        if metric["decimals"] is not None:
            assert cell["value"] == round(cell["value"], metric["decimals"])


def test_files_are_laid_out_one_cell_a_line() -> None:
    for name in published_names():
        text = (files("rgpr_paper") / "published" / f"{name}.json").read_text(encoding="utf-8")
        lines = [line.strip().rstrip(",") for line in text.splitlines()]
        assert published(name)["cells"] == [json.loads(x) for x in lines if '"bold"' in x]


SIZES = {
    "acc_ece": 2 * 7 * 4,
    "calib_ood": 4 * 4,
    "cifar10c": 7 * 5,
    "ood_auroc_auprc": 4 * 5 * 7 * 2,
    "ood_avg": 7 * 4,
    "ood_faraway": 7 * 2,
    "ood_hyperopt": 4 * (5 * 7 * 2 + 7),  # no FPR for the test data themselves
    "ood_imagenet": 2 * 3 * 4,
    "ood_non_bayesian": 2 * 2 + 3 * 2,
    "ood_reg_faraway": 8 * 4 * 2,
    "opt_hyperparams": 3 * (4 * 5 - 1),  # LeNet has one layer less
    "rotated_mnist": 7 * 13,
}


def test_every_file_is_complete() -> None:
    assert {name: len(published(name)["cells"]) for name in published_names()} == SIZES


# Read from the source by eye, not by the parser above.
BY_EYE: list[tuple[str, Cell]] = [
    ("ood_hyperopt", {"in": "CIFAR100", "out": "UniformNoise", "method": "LLL-RGPR-LL",
                      "metric": "FPR95", "value": 24.0, "error": 0.8, "bold": True}),
    ("ood_hyperopt", {"in": "SVHN", "out": "SVHN", "method": "LLL-RGPR-OOD",
                      "metric": "MMC", "value": 88.0, "error": 0.0, "bold": False}),
    ("ood_hyperopt", {"in": "CIFAR10", "out": "SVHN", "method": "DE",
                      "metric": "FPR95", "value": 37.0, "error": None, "bold": False}),
    ("ood_auroc_auprc", {"in": "CIFAR100", "out": "SVHN", "method": "GP-DSCS",
                         "metric": "AUPRC", "value": 73.3, "error": 0.0, "bold": True}),
    ("ood_non_bayesian", {"in": "CIFAR10", "out": "SVHN", "against": "DUQ",
                          "method": "DUQ, lambda 0.5", "metric": "AUROC", "value": 92.7,
                          "error": None, "bold": True}),
    ("opt_hyperparams", {"in": "SVHN", "layer": "Input", "method": "LLL-RGPR-OOD",
                         "metric": "sigma2", "value": 8.285, "error": None, "bold": False}),
    ("ood_reg_faraway", {"in": "wine", "method": "SVGP-RGPR", "metric": "outliers",
                         "value": 1956.027, "error": None, "bold": True}),
    ("ood_faraway", {"in": "SVHN", "method": "SWAG", "metric": "confidence", "value": 50.2,
                     "error": 4.2, "bold": False}),
    ("acc_ece", {"in": "CIFAR100", "method": "DE", "metric": "ECE", "value": 1.9,
                 "error": None, "bold": False}),
    ("calib_ood", {"in": "MNIST", "method": "ACET", "metric": "ECE", "value": 5.9,
                   "error": None, "bold": False}),
    ("cifar10c", {"method": "DE", "metric": "Brier", "value": 0.354, "error": None,
                  "bold": True}),
    ("ood_imagenet", {"in": "CIFAR10", "method": "LLL-RGPR-OOD ImageNet", "metric": "FPR95",
                      "value": 39.5, "error": None, "bold": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cell"), BY_EYE)
def test_cells_read_by_eye(name: str, cell: Cell) -> None:
    assert cell in published(name)["cells"]


def test_what_is_printed_twice_is_the_same() -> None:
    for name, metric in (("acc_ece", "ECE"), ("ood_avg", "FPR95")):
        for trained in published("ood_imagenet")["axes"]["in"]:
            for method in ("LLL-RGPR-LL", "LLL-RGPR-OOD"):
                place = {"in": trained, "method": method, "metric": metric}
                assert value("ood_imagenet", **place) == value(name, **place)
    place = {"in": "CIFAR10", "method": "LLL-RGPR-OOD"}
    assert value("ood_non_bayesian", **place, metric="accuracy") == value(
        "acc_ece", **place, metric="accuracy"
    )
    for out in ("LSUN", "SVHN"):
        place |= {"out": out, "metric": "AUROC"}
        assert value("ood_non_bayesian", against="Mahalanobis", **place) == value(
            "ood_auroc_auprc", **place
        )
    for method in METHODS:
        upright = value("rotated_mnist", method=method, angle=0)
        printed = value("acc_ece", **{"in": "MNIST"}, method=method, metric="accuracy")
        assert 100 * upright == pytest.approx(printed, abs=0.1)


def test_the_averages_need_a_sixth_set() -> None:
    """The printed averages are not those of the five sets; all fit six, MNIST's sixth being 0."""
    cells = published("ood_hyperopt")["cells"]
    for cell in published("ood_avg")["cells"]:
        rows = [
            row["value"]
            for row in cells
            if (row["in"], row["method"], row["metric"]) == (cell["in"], cell["method"], "FPR95")
        ]
        assert len(rows) == 5
        sixth = 6 * cell["value"] - sum(rows)
        assert -0.55 <= sixth <= 100.55
        if cell["in"] == "MNIST":
            assert sixth == pytest.approx(0, abs=0.55)
            assert sum(rows) / 5 > cell["value"] + 0.5


def test_calibration_error_is_at_least_confidence_less_accuracy() -> None:
    for method in METHODS:
        metric = {m: value("cifar10c", method=method, metric=m) for m in
                  ("ECE", "confidence", "accuracy")}  # fmt: skip
        assert metric["ECE"] >= abs(metric["confidence"] - metric["accuracy"]) - 0.002


def test_calibration_errors_that_confidence_and_accuracy_rule_out() -> None:
    """|a - c| <= (1 - a) + (1 - c) in each bin, so also on the average of the examples."""
    too_large = []
    for cell in published("acc_ece")["cells"]:
        if cell["metric"] == "ECE":
            own = {"in": cell["in"], "method": cell["method"]}
            accuracy = value("acc_ece", **own, metric="accuracy")
            confidence = value("ood_hyperopt", **own, out=cell["in"], metric="MMC")
            if cell["value"] > 200 - accuracy - confidence + 0.15:  # three rounded numbers
                too_large.append(cell["in"])
            assert cell["value"] >= abs(accuracy - confidence)
    assert Counter(too_large) == {"MNIST": 7, "CIFAR10": 2, "SVHN": 6}


def test_bold_is_best_but_where_a_remark_says_otherwise() -> None:
    exceptions = []
    for name in set(published_names()) - {"ood_faraway", "ood_reg_faraway"}:
        table = published(name)
        for cell in table["cells"]:
            best = max if table["metrics"][cell["metric"]]["better"] == "higher" else min
            rivals = [
                other["value"]
                for other in table["cells"]
                if all(other[axis] == cell[axis] for axis in table["axes"] if axis != "method")
            ]
            if cell["bold"] and cell["value"] != best(rivals):
                exceptions.append((name, cell["value"]))
    assert sorted(exceptions) == [("ood_hyperopt", 4.1), ("ood_hyperopt", 73.7)]


@pytest.mark.parametrize("name", ["ood_faraway", "ood_reg_faraway"])
def test_bold_is_the_better_of_a_base_and_its_rgpr(name: str) -> None:
    for cell in published(name)["cells"]:
        assert cell["bold"] == (cell["method"].endswith("-RGPR") and cell["metric"] != "inliers")
        if cell["bold"]:
            base = {"in": cell["in"], "method": cell["method"].removesuffix("-RGPR")}
            other = value(name, **base, metric=cell["metric"])
            assert cell["value"] < other if name == "ood_faraway" else cell["value"] > other


def test_error_bars_that_do_not_double() -> None:
    pairs = [
        (base, data)
        for data in published("ood_reg_faraway")["axes"]["in"]
        for base in ("LLL", "KFL", "SWAG", "SVGP")
        if value("ood_reg_faraway", **{"in": data}, method=f"{base}-RGPR", metric="outliers")
        < 2 * value("ood_reg_faraway", **{"in": data}, method=base, metric="outliers")
    ]
    assert pairs == [
        ("KFL", "housing"), ("KFL", "concrete"), ("SWAG", "concrete"), ("KFL", "energy"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("votes", "method"), [(10, "KFL-RGPR"), (10, "SWAG-RGPR"), (20, "SVDKL-RGPR"), (20, "GP-DSCS")]
)
def test_votes_of_saturated_samples_explain_far_away_confidence(votes: int, method: str) -> None:
    counts = torch.nn.functional.one_hot(torch.randint(10, (50_000, votes)), 10).sum(1)
    winner = 100 * counts.amax(1).double().mean().item() / votes
    printed = value("ood_faraway", **{"in": "SVHN"}, method=method)
    assert winner == pytest.approx(printed, abs=0.25)


def test_rotated_accuracies_are_five_runs_over_ten_thousand_images() -> None:
    """Sums of five whole counts, and of their squares: so the band is one standard deviation."""
    for cell in published(FIGURE)["cells"]:
        mean, std = 10_000 * cell["value"], 10_000 * cell["error"]
        assert 5 * mean == pytest.approx(round(5 * mean), abs=1e-6)
        squares = 5 * (std**2 + mean**2)
        assert squares == pytest.approx(round(squares), abs=0.01, rel=0)


def test_added_variance_explains_the_sparse_gp_s_error_bars() -> None:
    """sqrt(0.001 * mean |2000 z|^3 / 3) of normal z, which only the number of inputs moves."""
    for data, inputs in (("housing", 13), ("concrete", 8), ("energy", 8), ("wine", 11)):
        z = 2000 * torch.randn(20_000, inputs, dtype=torch.float64)
        bar = (0.001 * z.abs().pow(3).mean(1) / 3).sqrt().mean().item()
        printed = value("ood_reg_faraway", method="SVGP-RGPR", metric="outliers", **{"in": data})
        assert bar == pytest.approx(printed, rel=0.02)
