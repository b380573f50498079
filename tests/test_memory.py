"""The memory that heads with many classes take: the most that tensors had at a time."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from rgpr.posteriors import LastLayerLaplace, fit_laplace

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import tensor_memory


def test_what_is_counted() -> None:
    def run() -> list[torch.Tensor]:
        kept = [torch.zeros(1000, 250)]
        torch.zeros(2000, 250)  # is gone when the next one comes
        return [*kept, torch.zeros(1000, 250)]

    assert tensor_memory(run) == pytest.approx(3e6, rel=0.01)


@pytest.mark.parametrize("base", ["network", "last-layer Laplace"])
def test_a_call_keeps_no_tensor_until_python_looks_for_circles(base: str) -> None:
    """On a GPU the features of past batches would fill the memory."""
    network, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(60, 8)
    loader = DataLoader(TensorDataset(x, torch.arange(60) % 3), batch_size=20)
    posterior = network if base == "network" else fit_laplace(network, loader, subset="last_layer")
    model = rgpr.RGPR(posterior).fit(loader, progress=False)
    with torch.no_grad():
        model(x)
        gc.collect()
        gc.disable()
        try:
            model(x), model.score(x), model.predict(x)
            before = tensors()
            for _ in range(3):
                model(x), model.score(x), model.predict(x)
            assert tensors() == before
        finally:
            gc.enable()


def tensors() -> int:
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("classes", "width"), [(8000, 1024), pytest.param(21_000, 2048, marks=pytest.mark.slow)]
)
def test_fit_takes_little_more_than_the_means_of_its_classes(classes: int, width: int) -> None:
    """The means in float64, and three forms of them in float32 that the residual keeps.

    Beside that there are a few batches, and a few matrices of features by features; neither grows
    with the number of classes. Of 21 000 classes and 2048 features all of it is little more than
    three times the means.
    """
    network = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, classes))
    batches = [(torch.randn(len(y), 8), y) for y in torch.randperm(classes).split(200)]
    model = rgpr.RGPR(network)
    means = 8 * classes * width
    limit = 2.7 * means + 4 * 8 * width**2 + (1 << 27)
    assert tensor_memory(lambda: model.fit(batches, progress=False)) < limit
    assert len(model.residual.at(1).centers) == classes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("classes", "width"), [(3000, 32), pytest.param(21_000, 2048, marks=pytest.mark.slow)]
)
def test_a_last_layer_laplace_takes_its_factors_and_little_more(classes: int, width: int) -> None:
    """Two factors are kept; in float64 a third would be twice as large."""
    network = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, classes))
    square = torch.rand(classes, classes)
    tensors = {
        "in_basis": torch.eye(width),
        "out_basis": square,
        "spectrum": torch.rand(width, classes),
        "bias_root": square,
    }

    def run() -> LastLayerLaplace:
        base = LastLayerLaplace(network, "2", "kron", tensors, "classification")
        with torch.no_grad():
            gaussian = base(torch.randn(4, 8))
            assert gaussian.variance.shape == gaussian.row_sums.shape == (4, classes)
            assert gaussian.noise(2).shape == (2, 4, classes)
        return base

    assert tensor_memory(run) < 2.6 * square.nbytes


@pytest.mark.parametrize(
    ("structure", "classes", "width", "limit"),
    [
        ("diag", 21_000, 2048, 9 * 21_000 * 2049),
        ("kron", 1500, 16, 7 * 1500**2),
    ],
)
@pytest.mark.parametrize("batches", [2, 6])
def test_a_last_layer_laplace_is_fitted_in_bounded_memory(
    structure: str, classes: int, width: int, limit: int, batches: int
) -> None:
    """A few times the numbers that are fitted, whatever the number of batches.

    laplace-torch itself goes by a Jacobian for each example of a batch. Those of 32 examples,
    21 000 classes and 2048 features would fill 116 TB.
    """
    network = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, classes))
    x, y = torch.randn(32 * batches, 8), torch.arange(32 * batches) % classes
    loader = DataLoader(TensorDataset(x, y), batch_size=32)

    def run() -> object:
        return fit_laplace(network, loader, structure=structure, subset="last_layer")

    assert tensor_memory(run) < 4 * limit + (1 << 22)
