"""``rgpr audit`` and ``rgpr monitor`` over files as users have them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rgpr.cli import main

MODEL = ("--model", "command_nets:digits")


def data(here: Path) -> None:
    """Test data in random order, and outliers."""
    rng = np.random.default_rng(0)
    with np.load(here / "new.npz") as new:
        order = rng.permutation(len(new["X"]))
        x, y = new["X"][order], new["target"][order]
    np.savez(here / "test.npz", x=x, y=y)
    np.savez(here / "noise.npz", x=rng.random(x.shape, dtype=np.float32))


def test_one_command_from_weights_to_a_report(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(here)
    fit = ("--weights", "weights.safetensors", "--train", "train.npz", "--val", "val.npz")
    rest = ("--test", "test.npz", "--ood", "noise=noise.npz", "--out", "report.html")
    assert main(["audit", *MODEL, *fit, *rest, "--title", "My digits", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answers"]["RGPR"]["accuracy"] > 0.8
    assert told["detection"]["noise"]["RGPR, score"]["auroc"] > 0.95
    html = (here / "report.html").read_text()
    assert "<h1>My digits</h1>" in html
    assert told["warnings"] == []
    assert told["like_held_out"] in (True, False)
    assert "<img" not in html  # columns are no picture, unless --image says so
    assert "rgpr" in html
    assert "500 inputs with labels" in html


def test_a_fitted_model_in_words(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(here)
    base = ["audit", *MODEL, "--test", "new", "--preprocess", "command_nets:flat"]
    assert main([*base, "--fitted", "m.safetensors", "--out", "r.html"]) == 0
    assert "RGPR, score" in capsys.readouterr().out
    html = (here / "r.html").read_text()
    assert html.count("<img") == 12  # of a folder of images, though --preprocess made them flat
    assert "<h1>digits</h1>" in html
    assert re.search(r"<span>\d/<wbr>\d{4}\.png</span>", html)
    wrong = {
        "ends in .html or .htm": [*base, "--fitted", "none", "--out", "r.pdf"],
        "give either --fitted FILE, or --train DATA": [*base, "--out", "r.html"],
        "no folder": [*base, "--fitted", "m.safetensors", "--out", "none/r.html"],
        "this name is taken": [
            *(*base, "--fitted", "m.safetensors", "--out", "r.html"),
            *("--ood", "a=test.npz", "--ood", "a=test.npz"),
        ],
        "rgpr calibrate does it": [
            *(*base, "--fitted", "m.safetensors", "--val", "val.npz", "--out", "r.html"),
        ],
    }
    for words, arguments in wrong.items():
        assert main(arguments) == 1
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*base, "--ood", "no-name", "--out", "r.html"])
    assert "expected NAME=DATA" in capsys.readouterr().err


def test_what_is_warned_of_stands_in_the_report(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(here)
    mistakes = ("--train", "train.npz", "--val", "train.npz", "--test", "train.npz")
    assert main(["audit", *MODEL, *mistakes, "--out", "r.html", "--image", "8x8"]) == 0
    html, said = (here / "r.html").read_text(), capsys.readouterr().err
    for words in (
        "o --weights: the weights are those that command_nets:digits",
        "p-values and sets will not keep their promise",
        "test inputs are training inputs that fit saw",
        "test inputs are validation inputs that calibrate saw",
    ):
        assert words in said
        assert html.count(words) == 1
    assert html.count("<img") == 12


def test_classes_have_the_names_of_their_folders(here: Path) -> None:
    names = {str(number): f"kind{number}" for number in range(10)}
    for number, name in names.items():
        shutil.copytree(here / "new" / number, here / "named" / name)
    classes = ("--classes", ",".join(names.values()))
    base = ("audit", *MODEL, "--weights", "weights.safetensors", "--train", "train.npz")
    rest = ("--test", "named", "--preprocess", "command_nets:flat", "--out", "r.html")
    assert main([*base, *rest[:2], *classes, *rest[2:]]) == 1  # --classes is for folders alone
    fit = ("--weights", "weights.safetensors", "--train", "train.npz", "--out", "f.safetensors")
    assert main(["fit", *MODEL, *fit]) == 0
    fitted = ("audit", *MODEL, "--fitted", "f.safetensors")
    assert main([*fitted, *rest, *classes]) == 0
    html = (here / "r.html").read_text()
    assert re.search(r"<b>kind\d</b> \d", html)
    assert re.search(r"<span>kind\d/<wbr>\d{4}\.png", html)
    assert "class 1" not in html


def test_a_monitor_goes_on_from_run_to_run(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(here)
    rest = (*MODEL, "--state", "s.safetensors", "--log", "log.jsonl", "--json")
    assert main(["monitor", "m.safetensors", "test.npz", *rest]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["count"] == 397
    import matplotlib.pyplot as plt

    plt.close("all")
    more = ("--prometheus", "m.prom", "--plot", "p.png")
    assert main(["monitor", "m.safetensors", "noise.npz", *rest, *more]) == 3
    second = json.loads(capsys.readouterr().out)
    assert second["count"] == 794
    assert second["alarm"]
    assert second["new"]
    assert second["since"] > 380
    assert len((here / "log.jsonl").read_text().splitlines()) == 2
    assert "rgpr" in (here / "m.prom").read_text()
    assert (here / "p.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert main(["monitor", "m.safetensors", "test.npz", *rest, "--alpha", "0.5"]) == 1
    assert "was begun with 0.01" in capsys.readouterr().err
    # One run over both gives the same.
    with np.load(here / "test.npz") as one, np.load(here / "noise.npz") as other:
        np.savez(here / "both.npz", x=np.concatenate([one["x"], other["x"]]))
    once = (*MODEL, "--state", "t.safetensors", "--json")
    assert main(["monitor", "m.safetensors", "both.npz", *once]) == 3
    both = json.loads(capsys.readouterr().out)
    assert both["when"] == second["when"]
    assert both["log10"] == pytest.approx(second["log10"], rel=1e-6)


@pytest.mark.filterwarnings("always")
def test_words_for_what_is_forgotten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights, a target among the inputs, and no calibration."""
    train = ("--train", "train.npz", "--out", "bare.safetensors")
    assert main(["fit", *MODEL, *train]) == 0
    assert "no --weights: the weights are those that command_nets:digits" in capsys.readouterr().err
    weights = ("--weights", "weights.safetensors")
    assert main(["fit", *MODEL, *weights, *train]) == 0
    assert "no --weights" not in capsys.readouterr().err
    out = ("--out", "a.csv")
    assert main(["predict", "bare.safetensors", "new.csv", *MODEL, *out]) == 0
    assert "not calibrated, so there are no p-values" in capsys.readouterr().out
    table = (here / "new.csv").read_text().replace("label", "digit", 1)
    (here / "digit.csv").write_text(table)
    assert main(["fit", *MODEL, *weights, "--train", "digit.csv", "--out", "x.safetensors"]) == 1
    said = capsys.readouterr().err
    assert "digit.csv" in said
    assert "(B, 65)" in said
    assert "name it by --target" in said
