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
    model.set_threshold([torch.randn(100, 4)], progress=False)
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
        flagged = model.flag(torch.from_numpy(x))
    np.testing.assert_allclose(
        np.stack([row["probabilities"] for row in rows]), expected.numpy(), atol=1e-6
    )
    assert [row["prediction"] for row in rows] == expected.argmax(1).tolist()
    assert [row["flagged"] for row in rows] == flagged.tolist()
    assert set(rows[0]) == {"id", "prediction", "confidence", "probabilities", "flagged"}


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
    assert set(found) == {"mean", "variance"}
    with pytest.raises(KeyError, match="name the inputs with column="):
        predict({"images": x})
    with pytest.raises(FileNotFoundError, match="save a model there first"):
        scoring.score(None, tmp_path / "nothing", mlp)
