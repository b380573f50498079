from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rgpr.cli import main
from rgpr_paper import methods, networks
from rgpr_paper.context import Context
from rgpr_paper.experiments import detection
from rgpr_paper.units import read_units

SMALL = ["paper", "run", "detection", "--small"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection") / "new"
    assert main([*SMALL, "--seeds", "0", "1", "--out", str(folder)]) == 0
    return folder


def test_every_method_has_a_row(out: Path) -> None:
    result = read_units(out / "detection")[1].result
    assert result["seed"] == 1
    assert list(result["methods"]) == list(detection.methods())
    kinds = {"inverted", "mirrored", "UniformNoise"}
    for name, found in result["methods"].items():
        for metric in ("fpr95", "auroc", "auprc"):
            assert set(found[metric]) == {*kinds, "mean"}
            assert all(0 <= value <= 1 for value in found[metric].values())
        assert (
            ("ece" not in found)
            == ("mmc" not in found)
            == (name in (*methods.detectors(), "LLL-RGPR-score"))
        )
        if "mmc" in found:
            assert set(found["mmc"]) == {*kinds, "test"}
    lines = (out / "detection" / "detection.md").read_text().splitlines()
    for name in detection.methods():
        rows = [line for line in lines if line.startswith(f"| {name} |")]
        alone = name in (*methods.detectors(), "LLL-RGPR-score")
        # All metrics; FPR95, MMC, AUROC, AUPRC by set; calibration.
        assert [row.count("|") for row in rows if row.count("|") > 3] == (
            [7, 5, 5, 5] if alone else [7, 5, 6, 5, 5]
        )
    assert result["sizes"] == {
        "train": 1257,
        "validation": 108,
        "test": 432,
        "outliers": {"inverted": 540, "mirrored": 540, "UniformNoise": 540},
    }


def test_the_numbers_make_sense(out: Path) -> None:
    result = read_units(out / "detection")[0].result
    found = result["methods"]
    assert found["MAP"]["accuracy"] > 0.9
    for name in ("TS", "LLL", "LLL-RGPR-LL", "LLL-RGPR-OOD", "LLL-RGPR-onset"):
        assert found[name]["accuracy"] == pytest.approx(found["MAP"]["accuracy"], abs=0.005)
    default = found["LLL-RGPR-onset"]
    assert default["fpr95"]["UniformNoise"] < 0.05
    assert default["mmc"]["UniformNoise"] < 0.3 < 0.9 < default["mmc"]["test"]
    assert found["LLL-RGPR-score"]["auroc"]["UniformNoise"] > 0.99
    assert found["LLL-RGPR-score"]["auroc"]["mean"] > found["LLL"]["auroc"]["mean"]
    tuned = {"LLL-RGPR-LL", "LLL-RGPR-OOD", "LLL-RGPR-onset"}
    assert set(result["tuning"]) == tuned
    assert result["tuning"]["LLL-RGPR-OOD"]["ood_weight"] == 0.5


def test_the_page_is_that_of_the_seeds(out: Path) -> None:
    values = [
        unit.result["methods"]["KNN"]["fpr95"]["mean"] for unit in read_units(out / "detection")
    ]
    first = read_units(out / "detection")[0].result["methods"]["KNN"]["fpr95"]
    assert values[0] == pytest.approx(np.mean([v for k, v in first.items() if k != "mean"]))
    text = (out / "detection" / "detection.md").read_text()
    assert "detection --small --device cpu --seeds 0 1" in text
    assert f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}" in text
    assert "digits is a stand-in" in text
    assert "the FPR95 of LLL-RGPR-OOD is below that of LLL" in text
    assert "| ACET, quoted by the paper | - |" in text


def test_a_stopped_run_goes_on(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed whose file is there is not touched; one without is measured on its checkpoint."""
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    first, second = (copy / "detection" / f"digits-seed{seed}.json" for seed in (0, 1))
    before, written = json.loads(second.read_text()), first.stat().st_mtime_ns
    second.unlink()
    trained: list[int] = []
    real = networks.train

    def watched(network: Any, data: Any, plan: Any, options: Any) -> Any:
        watching = replace(options, callback=lambda epoch, _: trained.append(epoch))
        return real(network, data, plan, watching)

    monkeypatch.setattr(networks, "train", watched)
    detection.run(Context(copy, small=True, seeds=(0, 1)))
    assert trained == []
    assert first.stat().st_mtime_ns == written
    assert json.loads(second.read_text())["result"]["methods"] == before["result"]["methods"]
    assert (copy / "checkpoints" / ".gitignore").read_text() == "*\n"


def test_other_settings_and_missing_data(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--recipe", "paper", "--seeds", "0", "--out", str(out)]) == 2
    assert "recipe was 'fast' and is 'paper'" in capsys.readouterr().err
    assert main([*SMALL, "--sets", "cifar10", "--seeds", "0", "--out", str(tmp_path)]) == 1
    assert "Name the folder of data sets, --data ROOT" in capsys.readouterr().err
    options = ["--sets", "mnist", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main([*SMALL, *options]) == 1
    message = capsys.readouterr().err
    assert f"MNIST (train) is missing: looked for {tmp_path}" in message
    assert "Run the same with --download" in message
    options = ["--sets", "mnist", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path)]
    assert main([*SMALL, *options]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*SMALL, "--device", "nonsense", "--out", str(tmp_path)]) == 2
    assert "device 'nonsense': use cpu, cuda" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([*SMALL, "--device", "cuda", "--out", str(tmp_path)]) == 2
        assert "torch finds no GPU here" in capsys.readouterr().err
    assert main([*SMALL, "--sets", "nothing", "--out", str(tmp_path)]) == 2
    assert "no in-distribution set 'nothing'" in capsys.readouterr().err
