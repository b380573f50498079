"""The detector in pytorch-ood's own benchmark, beside its own detectors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytorch_ood.api import ModelNotSetException, RequiresFittingException
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.detector import MaxSoftmax
from pytorch_ood.metrics import OODMetrics
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import rgpr
from devices import NEEDS_GPU
from networks import mlp
from rgpr.integrations.pytorch_ood import RGPRDetector


def blobs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes in four dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return 4 * torch.eye(3, 4)[y] + 0.5 * torch.randn(n, 4, generator=generator), y


class Blobs(Benchmark):
    """Blobs against noise around them and far beyond them."""

    def __init__(self) -> None:
        self.ood_names = ["Near", "Far"]
        noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
        self._unknown = [
            TensorDataset(factor * noise, torch.full((60,), -1)) for factor in (2.0, 1000.0)
        ]

    def train_set(self) -> Dataset[Any]:
        return TensorDataset(*blobs(300, seed=0))

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset[Any]]:
        inside = TensorDataset(*blobs(90, seed=1))
        if not unknown:
            return [inside]
        return [ConcatDataset([inside, other]) if known else other for other in self._unknown]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """Trained on the blobs. Not to be changed by a test."""
    torch.manual_seed(0)
    network = mlp()
    x, y = blobs(300, seed=0)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture
def detector(network: nn.Module) -> RGPRDetector:
    return RGPRDetector(network).fit(DataLoader(Blobs().train_set(), batch_size=64))


def test_in_its_own_benchmark(network: nn.Module, detector: RGPRDetector) -> None:
    theirs = MaxSoftmax(network)
    with torch.no_grad():
        rows = Blobs().evaluate([detector, theirs], loader_kwargs={"batch_size": 50})
    found = {(row["Dataset"], row["Detector"]): row["AUROC"] for row in rows}
    assert set(found) == {(d, m) for d in ("Near", "Far") for m in ("RGPRDetector", "MaxSoftmax")}
    assert 0.9 < found["Near", "RGPRDetector"] < 1
    assert found["Far", "RGPRDetector"] == 1
    assert found["Far", "RGPRDetector"] > found["Far", "MaxSoftmax"]


def test_in_a_loop_of_its_metrics(detector: RGPRDetector) -> None:
    """The scores are those of the model, and its metrics agree with ours on them."""
    (data, _), metrics, scores, labels = Blobs().test_sets(), OODMetrics(), [], []
    for x, y in DataLoader(data, batch_size=50):
        metrics.update(detector(x), y)
        scores.append(detector.model.score(x).detach())
        labels.append(y)
    every, unknown = torch.cat(scores), torch.cat(labels) < 0
    expected = rgpr.metrics.auroc(-every[~unknown], -every[unknown])  # of confidences
    assert metrics.compute()["AUROC"] == pytest.approx(float(expected), abs=1e-6)


def test_outliers_of_the_training_set_are_left_out(network: nn.Module, detector: Any) -> None:
    x, y = blobs(300, seed=0)
    junk = 1e3 * torch.randn(20, 4)
    mixed = [
        (torch.cat([x[:150], junk]), torch.cat([y[:150], torch.full((20,), -1)])),
        (junk, torch.full((20,), -2)),
        (x[150:], y[150:]),
    ]
    found = RGPRDetector(network).fit(mixed).predict(x)
    torch.testing.assert_close(found, detector.predict(x))
    with pytest.raises(ValueError, match=r"no .*batch|empty"):
        RGPRDetector(network).fit(mixed[1:2])


def test_a_model_that_is_fitted_already(network: nn.Module) -> None:
    x, _ = blobs(300, seed=0)
    model = rgpr.RGPR(network, layers=["1"]).fit(x)
    assert torch.equal(RGPRDetector(model).predict(x), model.score(x).detach())
    given = RGPRDetector(network, layers=["1"]).fit([x])
    assert given.model.layers == ["input", "1"]
    torch.testing.assert_close(given.predict(x), model.score(x).detach())
    assert not given.predict(x).requires_grad


def test_what_cannot_be(network: nn.Module) -> None:
    with pytest.raises(RequiresFittingException, match="call fit"):
        RGPRDetector(network).predict(torch.randn(2, 4))
    with pytest.raises(ModelNotSetException, match="pass the network"):
        RGPRDetector(None)
    with pytest.raises(TypeError, match=r"leave out \['layers'\]"):
        RGPRDetector(rgpr.RGPR(network), layers=["1"])


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=NEEDS_GPU)],
)
def test_it_moves_as_a_whole(detector: RGPRDetector, device: str) -> None:
    x, _ = blobs(30, seed=3)
    expected = detector.predict(x)
    moved = RGPRDetector(copy.deepcopy(detector.model)).to(device)
    assert moved.device == torch.device(device, 0 if device == "cuda" else None)
    found = moved.predict(x)  # from wherever it is
    assert found.device.type == device
    # A float32 network rounds in another way on a GPU, which moves a score by some last digits.
    close = {"rtol": 1e-5, "atol": 1e-7} if device == "cuda" else {}
    torch.testing.assert_close(found.cpu(), expected, **close)
    assert RGPRDetector(moved.model).to("meta").device.type == "meta"
