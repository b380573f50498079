"""A local Ray cluster, with a worker lost on the way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

import rgpr  # noqa: E402
from networks import mlp  # noqa: E402
from rgpr.integrations import ray as scoring  # noqa: E402

ROWS = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}},
    )
    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, rgpr.RGPR]:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp()).fit([torch.randn(100, 4)])
    model.calibrate([torch.randn(100, 4)], progress=False)
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", model


def parquet(folder: Path) -> np.ndarray:
    """Eight files of arrays, as a cluster would find them."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    rows = [{"id": i, "x": row} for i, row in enumerate(x)]
    ray.data.from_items(rows, override_num_blocks=8).write_parquet(str(folder / "in"))
    return x


class Fragile(scoring.Predictor):
    """Kills its own process once, in the middle of the work."""

    marker = ""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if 100 in batch["id"] and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


@pytest.mark.slow
def test_every_row_once_although_a_worker_dies(
    cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = saved
    x = parquet(tmp_path)
    marker = tmp_path / "died"
    monkeypatch.setattr(Fragile, "marker", str(marker))
    monkeypatch.setattr(scoring, "Predictor", Fragile)
    scored = scoring.score(ray.data.read_parquet(str(tmp_path / "in")), path, mlp, batch_size=32)
    scored.write_parquet(str(tmp_path / "out"))
    assert marker.exists()
    rows = ray.data.read_parquet(str(tmp_path / "out")).take_all()
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    rows.sort(key=lambda row: row["id"])
    with torch.no_grad():
        expected = model(torch.from_numpy(x))
        score, p_value = model.score(torch.from_numpy(x)), model.p_value(torch.from_numpy(x))
    np.testing.assert_allclose(
        np.stack([row["probabilities"] for row in rows]), expected.numpy(), atol=1e-6
    )
    assert [row["prediction"] for row in rows] == expected.argmax(1).tolist()
    np.testing.assert_allclose([row["score"] for row in rows], score.numpy(), atol=1e-4)
    # Batches of another size are rounded otherwise, which moves a score by one rank at the most.
    moved = np.abs(np.array([row["p_value"] for row in rows]) - p_value.numpy())
    assert moved.max() <= 1.01 / 101
    assert set(rows[0]) == {
        "id",
        "prediction",
        "confidence",
        "probabilities",
        "score",
        "p_value",
    }


def test_a_predictor_by_hand(tmp_path: Path) -> None:
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([torch.randn(100, 4)])
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp(4, 2), keep=[], scale=0.5)
    x = np.random.default_rng(0).normal(size=(6, 4))
    found = predict({"x": x, "other": np.zeros(6)})
    with torch.no_grad():
        mean, variance = model(torch.from_numpy(x).float() * 0.5, diagonal_output=True)
    np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["variance"], variance.numpy(), rtol=1e-5)
    with torch.no_grad():
        score = model.score(torch.from_numpy(x).float() * 0.5)
    np.testing.assert_allclose(found["score"], score.numpy(), rtol=1e-5)
    assert set(found) == {"mean", "variance", "score"}
    with pytest.raises(KeyError, match="name the inputs with column="):
        predict({"images": x})
    with pytest.raises(FileNotFoundError, match="save a model there first"):
        scoring.score(None, tmp_path / "nothing", mlp)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_calibrated_predictor_by_hand(tmp_path: Path, labelled: bool) -> None:
    """Regression and bytes as inputs; p-values need no labels."""
    x = torch.randn(100, 4)
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([x])
    held_out = torch.randn(60, 4)
    batch = (held_out, torch.randn(60, 2)) if labelled else held_out
    model.calibrate([batch], progress=False)
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp(4, 2), scale=1 / 255)
    rows = np.random.default_rng(0).integers(0, 256, size=(6, 4), dtype=np.uint8)
    found = predict({"x": rows, "id": np.arange(6)})
    inputs = torch.from_numpy(rows).float() / 255
    with torch.no_grad():
        mean, variance = model(inputs, diagonal_output=True)
        expected = {"score": model.score(inputs), "p_value": model.p_value(inputs)}
    np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["variance"], variance.numpy(), rtol=1e-5)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.numpy(), rtol=1e-5)
    assert set(found) == {"id", "mean", "variance", "score", "p_value"}


def test_a_network_in_double_precision_gets_all_digits(tmp_path: Path) -> None:
    """Rounded to float32, inputs around a million would lose all that tells them apart."""
    x = 1e6 + torch.randn(100, 4).double() / 100
    network = mlp().double()
    model = rgpr.RGPR(network).fit([x])
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp().double())
    found = predict({"x": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found["score"], model.score(x).numpy(), rtol=1e-6)
