"""``rgpr audit`` and ``rgpr monitor`` over files as users have them."""

from __future__ import annotations

import json
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
    assert "My digits" in html
    assert "rgpr" in html
    assert "500 inputs with labels" in html


def test_a_fitted_model_in_words(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(here)
    base = ["audit", *MODEL, "--test", "new", "--preprocess", "command_nets:flat"]
    assert main([*base, "--fitted", "m.safetensors", "--out", "r.html"]) == 0
    assert "RGPR, score" in capsys.readouterr().out
    wrong = {
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
