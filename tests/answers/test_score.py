"""``model.score``: higher is stranger, for every base, without bound, never NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from answers.test_probabilities import directions
from networks import Task, blobs, mlp
from rgpr.answers.score import weighed
from rgpr.likelihoods import LIKELIHOODS
from rgpr.metrics import auroc, confidence
from rgpr.noise import permuted


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.01, 1e3))
def test_against_the_formula(seed: int, outputs: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = size * torch.randn(5, outputs, generator=generator, dtype=torch.float64)
    r = torch.rand(5, generator=generator, dtype=torch.float64) * 10
    for row in range(5):
        logits = [0.0, float(f[row, 0])] if outputs == 1 else f[row].tolist()
        top = max(logits)
        E = top + math.log(sum(math.exp(v - top) for v in logits)) - sum(logits) / len(logits)
        assert math.log(len(logits)) - 1e-12 <= E
        expected = 0.5 * math.log(float(r[row])) - math.log(E)
        assert float(weighed(r, f, LIKELIHOODS["classification"])[row]) == pytest.approx(
            expected, rel=1e-9
        )
        assert float(weighed(r, f, LIKELIHOODS["regression"])[row]) == pytest.approx(
            0.5 * math.log(r[row])
        )


def test_strangeness_by_hand(digits: Task) -> None:
    """The geometric mean of the hidden layers plus a small share of the mean of all."""
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    residual = model.residual
    with torch.no_grad():
        u = model._extension().read(3 * digits.x[:20]).u
    ratios = u / residual.typical
    expected = ratios[:, 1:].log().mean(1).exp() + 2**-10 * ratios.mean(1)
    torch.testing.assert_close(residual.strangeness(u), expected)


@pytest.mark.parametrize("which", list(directions()))
@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_without_bound_along_every_ray(which: str, residual: str) -> None:
    network, direction = directions()[which]
    x, y = blobs()
    model = rgpr.RGPR(network, residual=residual).fit([(x, y)])
    with torch.no_grad():
        alphas = [10.0**p for p in range(6, 31, 3)]  # where a dead layer has come to life
        scores = torch.stack([model.score((x[:3] + a * direction).float()) for a in alphas])
    assert not bool(scores.isnan().any())
    assert bool((scores.diff(dim=0) > 0.3 * math.log(10)).all() | scores[1:].isinf().all())
    assert scores.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_never_nan_for_finite_inputs(dtype: torch.dtype) -> None:
    x, y = blobs()
    model = rgpr.RGPR(mlp().to(dtype)).fit([(x.to(dtype), y)])
    largest = torch.finfo(dtype).max
    with torch.no_grad():
        for size in (0.0, 1e-30, 1.0, 1e3, largest / 100, largest):
            assert not bool(model.score((size * torch.ones(4, 4)).to(dtype)).isnan().any())
        special = torch.stack([torch.full((4,), v, dtype=dtype) for v in (math.inf, math.nan, 1)])
        found = model.score(special)
    assert found[0] == math.inf
    assert bool(found[1].isnan())
    assert bool(found[2].isfinite())


def test_it_is_fixed_by_the_fit(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    before = model.score(digits.x)
    model.calibrate([(digits.x[:250], digits.y[:250])])
    assert torch.equal(model.score(digits.x), before)
    model.sigma2, model.temperature = 7.0, 3.0
    assert torch.equal(model.score(digits.x), before)


def test_strangers_are_found_without_outliers(digits: Task) -> None:
    """Better than by the network's confidence, against shuffled pixels and noise."""
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    generator = torch.Generator().manual_seed(0)
    strange = {
        "shuffled": permuted(digits.x, scale=(1.0, 1.0), generator=generator),
        "noise": torch.rand(digits.x.shape, generator=generator),
    }
    with torch.no_grad():
        own = confidence(digits.network(digits.x).softmax(1))
        for z in strange.values():
            theirs = auroc(own, confidence(digits.network(z).softmax(1)))
            ours = auroc(-model.score(digits.x), -model.score(z))
            assert ours > theirs
            assert ours > 0.94


def test_regression_and_one_output() -> None:
    x, _ = blobs()
    regression = rgpr.RGPR(mlp(outputs=2), likelihood="regression").fit([x])
    binary = rgpr.RGPR(mlp(outputs=1), likelihood="classification").fit([x])
    for model in (regression, binary):
        near, far = model.score(x).mean(), model.score(30 * x).mean()
        assert near < far


def test_a_layer_that_never_varied_does_not_silence_the_others() -> None:
    """Its u is zero at all data; in the geometric mean it would make every input ordinary."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, 8, hidden=1)
            self.constant = nn.Linear(8, 8)
            nn.init.zeros_(self.constant.weight)
            self.last = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return self.last(torch.cat([h, self.constant(h)], 1))

    x, y = blobs(n=400)
    model = rgpr.RGPR(Constant(), layers=["inner.1", "inner.2", "constant"]).fit([(x, y)])
    assert model.residual.typical.tolist()[3] == 0
    assert model.residual.exponents.tolist() == [0, 0.5, 0.5, 0]
    assert auroc(-model.score(x), -model.score(permuted(x, scale=(3.0, 3.0)))) > 0.8


@pytest.mark.parametrize("count", [40, 120])
def test_the_fit_measures_as_held_out_data_are_measured(count: int) -> None:
    """With few examples, training inputs lie nearer than others; the onset must not follow them."""
    torch.manual_seed(0)
    network = mlp(10, 3, width=60, hidden=1)
    shares = []
    for _ in range(20):
        x, other = torch.randn(count, 10), torch.randn(500, 10)
        loader = DataLoader(TensorDataset(x, torch.arange(count) % 3), batch_size=32)
        model = rgpr.RGPR(network).fit(loader, progress=False)
        with torch.no_grad():
            shares.append(float((model.variance(other) > 0).double().mean()))
    assert sum(shares) / len(shares) < 0.06  # 2 % are meant


def test_an_explanation_says_what_its_columns_mean() -> None:
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp()).fit([x], progress=False)
    head, first, *_ = (words := str(model.explain(x[:2]))).splitlines()
    assert head.split() == ["row", "score", "confidence", "variance", *model.layers]
    assert len(first.split()) == len(head.split())
    assert "1 is the median of the training data, 8 twice as far" in words
    # Twice the distance of the median input is eight, as the words say.
    strangeness = model.explain(x).strangeness
    assert 0.8 < float(strangeness[:, 0].median()) < 1.25
