from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rgpr.cli import main
from rgpr.paper import detection, run_experiment
from rgpr.paper.data import Loader, digits, grey, read_images, some, three_channels

SMALL = ["paper", "run", "detection", "--small"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection") / "new"
    assert main([*SMALL, "--seeds", "0", "1", "--out", str(folder)]) == 0
    return folder


def test_every_method_has_a_row(out: Path) -> None:
    result = json.loads((out / "digits-seed1.json").read_text())
    assert list(result["methods"]) == list(detection.METHODS)
    detectors = {"energy", "KNN", "Mahalanobis", "ViM"}
    for name, found in result["methods"].items():
        assert set(found["fpr95"]) == {"inverted", "mirrored", "uniform noise", "mean"}
        assert all(
            0 <= value <= 1 for value in [*found["fpr95"].values(), *found["auroc"].values()]
        )
        assert ("ece" not in found) == (name in detectors)
    lines = (out / "detection.md").read_text().splitlines()
    for name in detection.METHODS:
        rows = [line for line in lines if line.startswith(f"| {name} |")]
        assert [row.count("|") for row in rows] == [7, 5]
    assert result["sizes"] == {
        "train": 1257,
        "validation": 108,
        "test": 432,
        "outliers": {"inverted": 540, "mirrored": 540, "uniform noise": 540},
    }


def test_the_numbers_make_sense(out: Path) -> None:
    result = json.loads((out / "digits-seed0.json").read_text())
    methods, far = result["methods"], result["confidence far away"]
    assert methods["MAP"]["accuracy"] > 0.9
    for name in ("temperature", "LLL", "RGPR paper-LL", "RGPR paper-OOD", "RGPR adaptive"):
        assert methods[name]["accuracy"] == pytest.approx(methods["MAP"]["accuracy"], abs=0.005)
    assert methods["RGPR adaptive"]["fpr95"]["uniform noise"] < 0.05
    assert list(far) == ["1", "10", "100", "10000"]
    assert sorted(far.values(), reverse=True) == list(far.values())
    rgprs = {"RGPR paper-LL", "RGPR paper-OOD", "RGPR adaptive", "adaptive, temperature"}
    assert set(result["tuning"]) == rgprs
    assert result["tuning"]["RGPR paper-OOD"]["ood_weight"] == 0.5
    assert 1e-4 <= result["prior precision"] <= 1e4


def test_the_summary_is_that_of_the_seeds(out: Path) -> None:
    seeds = [json.loads((out / f"digits-seed{seed}.json").read_text()) for seed in (0, 1)]
    summary = json.loads((out / "detection.json").read_text())["digits"]
    assert summary["seeds"] == [0, 1]
    values = [seed["methods"]["KNN"]["fpr95"]["mean"] for seed in seeds]
    found = summary["methods"]["KNN"]["fpr95"]["mean"]
    assert found["seeds"] == values
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["spread"] == pytest.approx(np.std(values, ddof=1))
    by_set = [v for k, v in seeds[0]["methods"]["KNN"]["fpr95"].items() if k != "mean"]
    assert values[0] == pytest.approx(np.mean(by_set))
    text = (out / "detection.md").read_text()
    assert "--small --set digits --seeds 0 1 --device cpu" in text
    assert f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}" in text
    for stand_in in ("re-cropped from the full-number release", "LSUN", "EMNIST letters"):
        assert stand_in in text


def test_infinities_stay_out_of_the_files(tmp_path: Path) -> None:
    made = {"nll": float("inf"), "list": [1.0, float("nan")], "int": 3}
    detection._write_json(tmp_path / "made.json", made)
    content = json.loads((tmp_path / "made.json").read_text(), parse_constant=pytest.fail)
    assert content == {"nll": None, "list": [1.0, None], "int": 3}
    over_seeds = detection._over_seeds([content["nll"], 2.0])
    assert over_seeds == {"mean": None, "spread": None, "seeds": [None, 2.0]}


def test_a_stopped_run_goes_on(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed whose file is there is not touched; one without is measured on its checkpoint."""
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    first, second = copy / "digits-seed0.json", copy / "digits-seed1.json"
    before, written = json.loads(second.read_text()), first.stat().st_mtime_ns
    second.unlink()
    trained: list[int] = []
    real = detection.train

    def watched(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs, callback=lambda epoch, _: trained.append(epoch))

    monkeypatch.setattr(detection, "train", watched)
    detection.run(copy, small=True, seeds=[0, 1])
    assert trained == []
    assert first.stat().st_mtime_ns == written
    assert json.loads(second.read_text())["methods"] == before["methods"]
    assert not list(copy.glob("*.part"))
    assert (copy / "checkpoints" / ".gitignore").read_text() == "*\n"
    with pytest.raises(ValueError, match="is of a run with --small"):
        detection.run(copy, seeds=[0])


def test_missing_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--set", "cifar10", "--out", str(tmp_path)]) == 1
    assert "cifar10.npz, with --data ROOT" in capsys.readouterr().err
    options = ["--set", "mnist", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main([*SMALL, *options]) == 1
    error = capsys.readouterr().err
    assert f"expected {tmp_path / 'mnist.npz'}" in error
    assert "no .npz at all" in error
    with pytest.raises(ValueError, match="no set 'nothing'"):
        detection.run(tmp_path, name_of_set="nothing")
    with pytest.raises(TypeError, match="experiment 'tuning' has no option 'seeds'"):
        run_experiment("tuning", tmp_path, seeds=[0])


def _made(root: Path, name: str, shape: tuple[int, ...], train: int = 0) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", train), ("test", 40)):
        if count:
            arrays[f"x_{part}"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
            arrays[f"y_{part}"] = rng.integers(0, 10, count, dtype=np.uint8)
    np.savez(root / f"{name}.npz", **arrays)


def test_the_real_settings_read_made_data(tmp_path: Path) -> None:
    for name in ("mnist", "fashion_mnist", "kmnist", "letters_az_sample"):
        _made(tmp_path, name, (28, 28), train=60)
    for name in ("cifar10", "svhn", "scenes32", "cifar100"):
        _made(tmp_path, name, (32, 32, 3), train=60)
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        training, test, outliers = detection._on_device(detection.SETS[name], tmp_path, "cpu")
        assert training[0].shape == (60, *shape)
        assert test[0].shape == (40, *shape)
        assert len(outliers) == 5
        for x in outliers.values():
            batch = next(iter(Loader(x)))
            assert batch.shape == (40, *shape)
            assert batch.dtype == torch.float32
            assert 0 <= float(batch.min()) <= float(batch.max()) <= 1


def test_reading_images(tmp_path: Path) -> None:
    _made(tmp_path, "colour", (5, 6, 3))
    x, y = read_images(tmp_path, "colour")
    with np.load(tmp_path / "colour.npz") as file:
        assert torch.equal(x, torch.from_numpy(file["x_test"]).permute(0, 3, 1, 2))
        assert y.tolist() == file["y_test"].tolist()
    with pytest.raises(ValueError, match="has no x_train and no y_train"):
        read_images(tmp_path, "colour", "train")
    with pytest.raises(FileNotFoundError, match="in that folder there is colour"):
        read_images(tmp_path, "other")
    images, labels = np.zeros((3, 4, 4), np.float32), np.zeros(3)
    np.savez(tmp_path / "wrong.npz", x_test=images, y_test=labels)
    with pytest.raises(ValueError, match="expected uint8 images"):
        read_images(tmp_path, "wrong")
    np.savez(tmp_path / "wrong.npz", x_test=images.astype(np.uint8), y_test=labels[:2])
    with pytest.raises(ValueError, match="3 images and 2 labels"):
        read_images(tmp_path, "wrong")


def test_changed_images_are_the_same_images() -> None:
    x = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    coloured = three_channels(x)
    assert coloured.shape == (4, 3, 32, 32)
    assert torch.equal(coloured[:, 1, 2:-2, 2:-2], x[:, 0])
    assert coloured.float().sum() == 3 * x.float().sum()
    flat = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
    assert torch.allclose(grey(flat), torch.full((2, 1, 28, 28), 0.2))
    (x, y), (x_test, _) = digits()
    assert x.shape[1:] == (1, 16, 16)
    assert torch.equal(x[:, :, ::2, ::2], x[:, :, 1::2, 1::2])
    assert len(x) + len(x_test) == 1797
    assert sorted(some(torch.arange(9), 20, 3).tolist()) == list(range(9))
    assert torch.equal(some(x, 5, 1), some(x, 5, 1))
    assert len(torch.unique(y)) == 10
