"""Several independent labels, each a sigmoid: every answer against its formula in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from networks import blobs, laplace_over_blobs, mlp
from rgpr import export
from rgpr.posteriors import DiagonalGaussian
from rgpr.tuning import Options, Parameters
from rgpr.tuning.objectives.marginal import MarginalLikelihood

LABELS = 3


class Widened(rgpr.Posterior):
    """A network with a variance of its own for each label."""

    kind = "widened for labels"

    def forward(self, x: Tensor) -> DiagonalGaussian:
        mean = self.point(x)
        return DiagonalGaussian(mean, torch.tensor([0.5, 1.0, 4.0]).expand_as(mean))

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]


def data(n: int = 1500, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and labels that are there with a probability of their own each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    y = torch.rand(n, LABELS, generator=generator) < torch.sigmoid(2 * x[:, :LABELS])
    return x, y.long()


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    network = mlp(4, LABELS)
    x, y = data()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(network(x), y.float()).backward()
        optimizer.step()
    return network.eval()


def fitted(network: object, residual: str = "onset") -> rgpr.RGPR:
    return rgpr.RGPR(network, likelihood="multilabel", residual=residual).fit([data()])


@pytest.mark.parametrize("residual", ["onset", "paper"])
@torch.no_grad()
def test_the_formula(network: nn.Module, residual: str) -> None:
    x, v0 = 3 * data()[0][:50], torch.tensor([0.5, 1.0, 4.0]).double()
    model = fitted(Widened(network), residual)
    model.temperature = 1.7
    v, m = model.variance(x)[:, None], network(x).double()
    assert (v > 0).any()
    if residual == "paper":
        scaled = m / (1.7 * (1 + math.pi / 8 * (v0 + v)).sqrt())
    else:
        scaled = m / (1.7 * ((1 + math.pi / 8 * v0) * (1 + math.pi / 8 * v)).sqrt())
    torch.testing.assert_close(model(x), scaled.sigmoid().float(), atol=1e-6, rtol=1e-5)
    generator = torch.Generator().manual_seed(0)
    sampled = model(x, link_approx="mc", n_samples=20_000, generator=generator)
    logits = m + (v0 + v).sqrt() * torch.randn(20_000, *m.shape, dtype=torch.float64)
    torch.testing.assert_close(sampled, (logits / 1.7).sigmoid().mean(0).float(), atol=0.02, rtol=0)
    with pytest.raises(ValueError, match=r"link_approx='bridge' is for classes.*'probit' or 'mc'"):
        model(x, link_approx="bridge")


@pytest.mark.parametrize("residual", ["onset", "paper"])
@torch.no_grad()
def test_without_variance_it_is_the_base(network: nn.Module, residual: str) -> None:
    model, x = fitted(network, residual), data()[0]
    model.sigma2 = 0.0
    assert torch.equal(model(x), network(x).sigmoid())
    samples = model.predictive_samples(x, 4)
    assert torch.equal(samples, network(x).double().expand_as(samples))
    torch.testing.assert_close(model(x, link_approx="mc"), network(x).sigmoid())


@pytest.mark.parametrize("residual", ["onset", "paper"])
@torch.no_grad()
def test_far_away_each_is_one_half(network: nn.Module, residual: str) -> None:
    model, x = fitted(network, residual), data()[0][:20]
    assert (model(1e12 * x) - 0.5).abs().max() < 1e-3
    bad = torch.stack([torch.full((4,), torch.inf), 1e38 * x[0], torch.full((4,), torch.nan)])
    for link in ("probit", "mc"):
        answer = model(bad, link_approx=link, n_samples=8)
        assert (answer[0] == 0.5).all()
        torch.testing.assert_close(answer[1], torch.full((3,), 0.5), atol=1e-6, rtol=0)
        assert answer[2].isnan().all()
    # An even number of samples takes both signs equally often, for every label alone.
    assert (model(1e15 * x, link_approx="mc", n_samples=2) - 0.5).abs().max() < 1e-3
    assert model.score(bad)[0] == torch.inf


def test_a_single_label_agrees_with_two_classes() -> None:
    x, y = blobs(2, n=80)
    network = mlp(4, 1)
    alone = rgpr.RGPR(network, likelihood="multilabel").fit([(x, y)])
    # Classes have prototypes of their own, so the same residual is given to both.
    pair = rgpr.RGPR(network).fit([(x, y)])
    pair.residual = alone.residual
    far = 4 * x
    with torch.no_grad():
        assert alone(far).shape == (80, 1)
        torch.testing.assert_close(alone(far)[:, 0], pair(far)[:, 1])
        torch.testing.assert_close(alone.score(far), pair.score(far))


@torch.no_grad()
def test_the_score(network: nn.Module) -> None:
    model, x = fitted(network), 2 * data()[0][:40]
    extension = model._extension()
    r = model.residual.strangeness(extension.read(x).u)
    f = network(x).double()
    each = torch.log(1 + f.exp()) - f / 2
    torch.testing.assert_close(model.score(x), r.log() / 2 - each.mean(1).log())
    assert (model.score(1e4 * x) > model.score(x)).all()
    explained = model.explain(x)
    p = model(x).double()
    torch.testing.assert_close(explained.confidence, torch.maximum(p, 1 - p).amax(1))
    assert "confidence" in str(explained)


def test_prototypes_are_of_one_class(network: nn.Module) -> None:
    x, y = data()
    assert len(fitted(network).residual.at(1).centers) == 1
    labelled = rgpr.RGPR(network, likelihood="multilabel").fit([(x, y.float())])
    alone = rgpr.RGPR(network, likelihood="multilabel").fit([x])
    assert torch.equal(labelled.variance(3 * x), alone.variance(3 * x))


@torch.no_grad()
def test_calibrating(network: nn.Module) -> None:
    """The loss is the sum of binary cross-entropies, and bounds hold for all labels at once."""
    overconfident = nn.Sequential(network, Factor(4.0))
    model = rgpr.RGPR(overconfident, likelihood="multilabel").fit([data()])
    x, y = data(2000, seed=1)
    report = model.calibrate([(x, y.bool())])
    loss = F.binary_cross_entropy_with_logits(
        overconfident(x).double(), y.double(), reduction="none"
    )
    assert report.nll is not None
    assert report.nll[0] == pytest.approx(float(loss.sum(1).mean()), rel=1e-6)
    right = (overconfident(x) > 0).long() == y
    assert report.accuracy == pytest.approx(float(right.double().mean()))
    assert report.temperature[1] > 2
    assert report.nll[2] <= report.nll[0] + 0.005
    assert "NLL" in str(report)
    fresh, labels = data(2000, seed=2)
    low, high = model.interval(fresh, coverage=0.8)
    assert low.dtype == high.dtype == torch.bool
    assert (low <= high).all()
    covered = ((low <= labels.bool()) & (labels.bool() <= high)).all(1).double().mean()
    assert 0.77 < float(covered) < 0.9
    assert (low.any(1) | (~high).any(1)).double().mean() > 0.5  # and they say something
    low, high = model.interval(1e9 * fresh)
    assert high.all()
    assert not low.any()
    assert model.flag(1e3 * fresh).double().mean() > 0.9
    assert model.p_value(fresh).mean() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match=r"this model is for multilabel: use model\.interval"):
        model.predict_set(fresh)


class Factor(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, f: Tensor) -> Tensor:
        return self.factor * f


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_tuning_by_likelihood_and_outliers(network: nn.Module, link: str) -> None:
    model = fitted(network, "paper")
    x, y = data(100, seed=1)
    for objective in ("likelihood", "ood"):
        result = model.tune([(x, y)], objective, link_approx=link, n_samples=6)
        assert result.after >= result.before
    assert {"validation NLL", "validation ECE", "mean confidence at outliers"} <= set(
        result.metrics
    )
    if link == "probit":
        with torch.no_grad():
            p = model(x).double()
            q = model(30 * x).double()
        loss = F.binary_cross_entropy(p, y.double(), reduction="none").sum(1).mean()
        assert result.metrics["validation NLL"][1] == pytest.approx(float(loss), rel=1e-4)
        assert (q - 0.5).abs().max() < 0.3


def test_tuning_within_a_budget(network: nn.Module) -> None:
    """The budget is one of the sum over labels, above the base's own."""
    x, y = data(100, seed=1)
    model = rgpr.RGPR(network, layers="input", likelihood="multilabel", residual="paper")
    model.fit([x])
    result = model.tune([(x, y)], "ood", ood_weight=3.0, max_nll_increase=1.0)
    with torch.no_grad():
        base = F.binary_cross_entropy_with_logits(network(x), y.float(), reduction="none")
        now = F.binary_cross_entropy(model(x), y.float(), reduction="none")
    [trial] = result.trials
    assert trial.increase == pytest.approx(float((now - base).sum(1).mean()), abs=1e-4)
    assert 0.005 < trial.increase <= 1.0


def test_the_objective_of_outliers(network: nn.Module) -> None:
    """Its value is that of the formula: the target far away is 1/2 for every label."""
    model = fitted(network, "paper")
    x, y = data(60, seed=1)
    far = 5 * data(60, seed=2)[0]
    before = model.sigma2.clone()
    result = model.tune([(x, y)], "ood", ood=[far], ood_weight=0.5)
    model.sigma2 = before
    with torch.no_grad():
        p, q = model(x).double(), model(far).double()
    inside = -F.binary_cross_entropy(p, y.double(), reduction="none").sum(1).mean()
    outside = 0.5 * (q.log() + (1 - q).log()).sum(1).mean()
    assert result.before == pytest.approx(float(inside + 0.5 * outside), rel=1e-4)


def test_the_marginal_likelihood_is_that_of_each_label(network: nn.Module) -> None:
    x, y = data(40, seed=1)
    model = fitted(network, "paper")
    column = nn.Sequential(network, Column(0))
    one = rgpr.RGPR(column, ["0.1", "0.3"], "classification", residual="paper")
    one.fit([data()[0]])

    def value(model: rgpr.RGPR, target: Tensor) -> float:
        objective = MarginalLikelihood(model._extension(), [(x, target)], Options(progress=False))
        number = torch.ones((), dtype=torch.float64)
        return float(sum(objective.parts(Parameters(sigma2, number, number), 0.0)))

    sigma2, alone = model.sigma2, 0.0
    for label in range(LABELS):
        one.posterior.network[1].index = label
        alone += value(one, y[:, label])
    assert value(model, y) == pytest.approx(alone, rel=1e-6)


class Column(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, f: Tensor) -> Tensor:
        return f[:, self.index]


@torch.no_grad()
def test_the_certificate(network: nn.Module) -> None:
    x = data()[0][:200]
    for base in (network, Widened(network)):
        model = fitted(base)
        certificate = model.certify(eps=0.05)
        assert certificate.classes == 2
        assert set(certificate.radii) | set(certificate.obstacles) == {"head", "lipschitz"}
        assert "1/2" in str(certificate)
        coordinates = model.residual.at(0)
        direction = coordinates(x).double()
        direction = direction / direction.norm(dim=1, keepdim=True)
        for factor in (1.0, 2.0, 10.0):
            z = factor * certificate.radius * direction
            far = (coordinates.mean + coordinates.scale * z).float()
            p = model(far).double()
            assert torch.maximum(p, 1 - p).max() <= 0.55
            assert certificate.bound(factor * certificate.radius) <= 0.55 + 1e-9
        verdict = rgpr.check(model)
        assert verdict.holds
        assert "goes to 1/2 in every direction" in str(verdict)


def test_the_widest_label_is_bounded_and_not_a_pair(network: nn.Module) -> None:
    """Two labels of opposite signs are two gaps to zero, not one gap twice as wide."""
    labels = fitted(network).certify()
    one = rgpr.RGPR(nn.Sequential(network, Column(0)), likelihood="multilabel").fit([data()[0]])
    classes = rgpr.RGPR(network).fit([data()[0]])
    classes.residual = one.residual = fitted(network).residual
    widths = [
        float(bound.start) for bound in (labels.bounds["head"], classes.certify().bounds["head"])
    ]
    assert widths[0] < widths[1]


@torch.no_grad()
def test_files_and_graphs(network: nn.Module, tmp_path: Path) -> None:
    model = fitted(network)
    x, y = data(200, seed=1)
    model.calibrate([(x, y)])
    model.save(tmp_path / "model.safetensors")
    again = rgpr.load(tmp_path / "model.safetensors", mlp(4, LABELS))
    assert again.likelihood == "multilabel"
    far = torch.cat([x, 10 * x, 1e12 * x, torch.full_like(x[:1], torch.inf)])
    expected = model(far)
    assert torch.equal(again(far), expected)
    assert all(map(torch.equal, again.interval(far), model.interval(far)))
    program = export.program(model, x[:2])
    torch.export.save(program, tmp_path / "model.pt2")
    graph = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(graph(far), expected)


@torch.no_grad()
def test_onnx(network: nn.Module, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = fitted(network)
    x = data(50, seed=1)[0]
    path = export.onnx(model, tmp_path / "model.onnx", x[:2])
    session = onnxruntime.InferenceSession(str(path))
    far = torch.cat([x, 10 * x, 1e12 * x])
    names = ["probabilities", "score"]
    probabilities, score = session.run(names, {"x": far.numpy()})
    torch.testing.assert_close(torch.from_numpy(probabilities), model(far), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.from_numpy(score), model.score(far), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_compiled(network: nn.Module) -> None:
    model = fitted(network).eval()
    x = 3 * data(64, seed=1)[0]
    expected = model(x)
    model.compile(backend="eager")
    torch.testing.assert_close(model(x), expected)


def test_a_base_that_was_fitted_for_classes() -> None:
    pytest.importorskip("laplace", reason="needs the extra laplace")
    la, _, _ = laplace_over_blobs("classification", "kron")
    with pytest.raises(
        ValueError, match=r"fitted for classification.*'multilabel' cannot be.*network itself"
    ):
        rgpr.RGPR(la, likelihood="multilabel")


def test_it_is_not_assumed(network: nn.Module) -> None:
    """Without the word, rows of zeros and ones are refused in every call."""
    x, y = data(100)
    with pytest.raises(ValueError, match="likelihood='multilabel'"):
        rgpr.RGPR(network).fit([(x, y)])
