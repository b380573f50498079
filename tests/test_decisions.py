"""How strange an input is, and which representation made it so."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import EVERY_NETWORK, Task, blobs, laplace_over_blobs, mlp
from rgpr.residual.variance import SHARE

both_residuals = pytest.mark.parametrize("residual", ["onset", "paper"])


def strangeness_by_hand(model: rgpr.RGPR, x: Tensor) -> list[float]:
    """The geometric mean of the hidden layers' u and a share of the mean of all, row by row."""
    assert model.residual is not None
    u = model._extension().read(x).u.tolist()
    typical = model.residual.typical.tolist()
    found = []
    for row in u:
        parts = [value / (unit or 1.0) for value, unit in zip(row, typical, strict=True)]
        chosen = [p for p, unit in zip(parts[1:], typical[1:], strict=True) if unit > 0]
        chosen = chosen or parts[:1]
        logs = [math.log(p) for p in chosen]
        found.append(math.exp(math.fsum(logs) / len(logs)) + SHARE * math.fsum(parts) / len(parts))
    return found


# -- the score -----------------------------------------------------------------------------------


@both_residuals
@pytest.mark.parametrize("base", ["map", "laplace", "one output", "regression"])
def test_the_score_is_its_formula(base: str, residual: str) -> None:
    x, _ = blobs()
    network: object = mlp(4, 1 if base == "one output" else 3)
    if base == "laplace":
        network = laplace_over_blobs("classification", "kron")[0]
    likelihood = "regression" if base == "regression" else "classification"
    model = rgpr.RGPR(network, likelihood=likelihood, residual=residual).fit([x])
    far = torch.cat([x[:20], 3 * x[20:40], torch.randn(20, 4)])
    with torch.no_grad():
        score = model.score(far)
        logits = model.posterior(far).mean.double()
    assert score.shape == (60,)
    assert score.dtype == torch.float64
    if base == "one output":
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    expected = []
    for r, row in zip(strangeness_by_hand(model, far), logits.tolist(), strict=True):
        evidence = math.log(math.fsum(map(math.exp, row))) - math.fsum(row) / len(row)
        weight = 0.0 if base == "regression" else math.log(evidence)
        expected.append(math.log(r) / 2 - weight)
    torch.testing.assert_close(score, torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:sigma2")
@both_residuals
def test_the_score_is_fixed_by_the_fit(digits: Task, residual: str) -> None:
    """Neither scales nor temperature nor calibrating nor tuning change it, bit by bit."""
    model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader())
    x = torch.cat([digits.x[:50], torch.rand(50, 64)])
    with torch.no_grad():
        before = model.score(x)
        model.sigma2, model.temperature = 3.0, 2.0
        assert torch.equal(model.score(x), before)
        model.sigma2 = 0.0
        assert torch.equal(model.score(x), before)
        model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader())
        model.calibrate([(digits.x[:250], digits.y[:250])], progress=False)
        assert torch.equal(model.score(x), before)
        if residual == "paper":
            model.tune([(digits.x[:250], digits.y[:250])], "ood", progress=False)
            assert torch.equal(model.score(x), before)


@both_residuals
def test_noise_is_stranger_than_data(digits: Task, residual: str) -> None:
    from sklearn.metrics import roc_auc_score

    model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader())
    permuted = digits.x[:, torch.randperm(64)]
    for strange, least in ((torch.rand(400, 64), 0.999), (permuted, 0.99), (3 * digits.x, 0.95)):
        with torch.no_grad():
            scores = torch.cat([model.score(digits.x), model.score(strange)])
        labels = [0] * len(digits.x) + [1] * len(strange)
        assert roc_auc_score(labels, scores.numpy()) > least


@both_residuals
@pytest.mark.parametrize("name", ["mlp", "convolutional", "functional", "reused"])
def test_the_score_grows_like_half_the_logarithm_of_the_distance(name: str, residual: str) -> None:
    """The strangeness grows like the cube of the distance and the evidence like the distance."""
    build, shape = EVERY_NETWORK[name]
    x = torch.randn(60, *shape).double()
    model = rgpr.RGPR(build().double().eval(), residual=residual).fit([x])
    with torch.no_grad():
        scores = torch.stack([model.score(10.0**power * x) for power in (8, 9, 10)])
    rise = scores[1:] - scores[:-1]
    torch.testing.assert_close(rise, torch.full_like(rise, math.log(10) / 2), atol=0.02, rtol=0)


def test_a_common_part_of_all_logits_is_no_evidence() -> None:
    network, x = mlp(), torch.randn(80, 4)
    shifted = copy.deepcopy(network)
    shifted[-1].bias.data += 1000
    scores = [rgpr.RGPR(n).fit([x]).score(2 * x).detach() for n in (network, shifted)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-3)


def test_what_overflows_is_infinitely_strange() -> None:
    network, x = mlp(), torch.randn(80, 4)
    for module in network[::2]:
        module.weight.data *= 1e3
    model = rgpr.RGPR(network).fit([x])
    far = 1e37 * x
    with torch.no_grad():
        assert not network(far).isfinite().all()
        score = model.score(far)
    overflowed = ~network(far).isfinite().all(1)
    assert score[overflowed].isposinf().all()
    assert not score.isnan().any()


def test_a_broken_network_has_no_score() -> None:
    """A NaN near the data is shown, and not taken for a strange input."""
    network, x = mlp(), torch.randn(8, 4)
    model = rgpr.RGPR(network).fit([x])
    with torch.no_grad():
        network[-1].weight[0, 0] = torch.nan
    assert model.score(x).isnan().any()


# -- the explanation -----------------------------------------------------------------------------


@both_residuals
def test_an_explanation_adds_up(digits: Task, residual: str) -> None:
    model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader())
    x = torch.cat([digits.x[:3], 50 * digits.x[:1], torch.rand(1, 64)])
    explanation = model.explain(x)
    assert list(explanation.layers) == model.layers
    assert explanation.variance.shape == explanation.strangeness.shape == (5, 3)
    with torch.no_grad():
        v = model.variance(x)
        assert torch.equal(explanation.score, model.score(x))
        assert torch.equal(explanation.confidence, model(x).amax(1).double())
    torch.testing.assert_close(explanation.total, v)
    # Where there is no variance, nobody has a share in it.
    assert torch.equal(v == 0, torch.tensor([residual == "onset"] * 3 + [False] * 2))
    torch.testing.assert_close(explanation.share.sum(1), (v > 0).double())
    # Distances are multiples of what is typical of the data, so theirs are around one.
    assert model.residual is not None
    u = model._extension().read(x).u.detach()
    torch.testing.assert_close(explanation.strangeness, u / model.residual.typical)
    at_data = model.explain(digits.x).strangeness.median(0).values
    assert ((at_data > 0.7) & (at_data < 1.5)).all()
    lines = str(explanation).splitlines()
    assert len(lines) == 9
    assert lines[0].split() == ["row", "score", "confidence", "variance", *model.layers]
    for number, line in enumerate(lines[1:6]):
        columns = line.split()
        assert int(columns[0]) == number
        assert float(columns[1]) == pytest.approx(float(explanation.score[number]), abs=0.01)
        assert float(columns[2]) == pytest.approx(float(explanation.confidence[number]), abs=1e-3)
        assert float(columns[3]) == pytest.approx(float(v[number]), rel=0.01)
        shown = [float(column) for column in columns[4:]]
        assert shown == pytest.approx(explanation.strangeness[number].tolist(), rel=0.01)
    assert [line.partition(":")[0] for line in lines[6:]] == [
        "score",
        "variance",
        "columns of layers",
    ]


@both_residuals
def test_a_layer_that_is_made_strange_is_named(residual: str) -> None:
    """The second entry is a thousand standard deviations out: the input's doing."""
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp(), residual=residual).fit([x])
    model.sigma2 = [1.0, 0.0, 0.5]
    strange = x[:1].clone()
    strange[0, 1] = 1e3
    share = model.explain(strange).share[0]
    assert share[1] == 0
    assert share[0] > share[2] > 0
    far = model.explain(torch.cat([1e38 * strange, torch.full((1, 4), torch.inf)]))
    assert torch.equal(far.total.isinf(), torch.tensor([True, True]))
    torch.testing.assert_close(far.share.sum(1), torch.ones(2).double())
    assert far.score.isposinf().all()
    spoiled = model.explain(torch.full((1, 4), torch.nan))
    assert spoiled.total.isnan().all()
    assert spoiled.score.isnan().all()
    model.sigma2 = 0.0
    off = model.explain(strange)
    assert (off.share == 0).all()
    assert off.strangeness[0, 0] > 1e3  # what is strange does not depend on the scales
    regression = rgpr.RGPR(mlp(), likelihood="regression", residual=residual).fit([x])
    assert regression.explain(x[:2]).confidence is None
    assert "-" in str(regression.explain(x[:2])).splitlines()[1].split()


def test_a_layer_that_never_varied_is_measured_as_it_is() -> None:
    """It has no typical distance, so that its own number is shown."""

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp_max(-1e9) * 0 + 1

    network = nn.Sequential(nn.Linear(4, 8), Constant(), nn.Linear(8, 3))
    x = torch.randn(80, 4)
    model = rgpr.RGPR(network, layers=["0", "1"]).fit([x])
    assert model.residual is not None
    assert model.residual.typical[2] == 0
    explanation = model.explain(torch.cat([x, 100 * x]))
    assert (explanation.strangeness[:, 2] == 0).all()
    assert explanation.score.isfinite().all()
    assert (explanation.score[80:] > explanation.score[:80]).all()
    assert (explanation.total[80:] > 0).double().mean() > 0.9
