from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr.posteriors import MAP
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian, standard_normal


class Ensemble:
    """A type the library has never heard of."""

    def __init__(self, networks: list[nn.Module]) -> None:
        self.networks = networks


class EnsemblePosterior(rgpr.Posterior):
    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__(ensemble.networks[0])
        self.others = nn.ModuleList(ensemble.networks[1:])

    def forward(self, x: Tensor) -> Gaussian:
        outputs = torch.stack([self.point(x), *(network(x) for network in self.others)])
        return DiagonalGaussian(outputs.mean(0), outputs.var(0))

    def sample(self, x: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        outputs = torch.stack([self.point(x), *(network(x) for network in self.others)])
        return outputs[torch.randint(len(outputs), (n_samples,), generator=generator)]


def test_registration_extends_as_posterior() -> None:
    ensemble = Ensemble([mlp() for _ in range(5)])
    with pytest.raises(TypeError, match=r"no posterior is known for .*Ensemble"):
        rgpr.as_posterior(ensemble)
    rgpr.register_posterior(Ensemble, EnsemblePosterior)

    class Special(Ensemble):
        pass

    x = torch.randn(40, 4)
    model = rgpr.RGPR(Special(ensemble.networks)).fit([x])
    assert isinstance(model.posterior, EnsemblePosterior)
    torch.testing.assert_close(model(1e9 * x), torch.full((40, 3), 1 / 3), atol=1e-3, rtol=0)
    assert model(x, link_approx="mc", n_samples=7).shape == (40, 3)
    with pytest.raises(TypeError, match="EnsemblePosterior cannot be saved: its class has no kind"):
        model.save("never.safetensors")


def test_a_module_is_a_point_estimate() -> None:
    network, x = mlp(), torch.randn(6, 4)
    posterior = rgpr.as_posterior(network)
    assert isinstance(posterior, MAP)
    assert rgpr.as_posterior(posterior) is posterior
    gaussian = posterior(x)
    assert torch.equal(gaussian.mean, network(x))
    assert torch.equal(gaussian.variance, torch.zeros(6, 3).double())
    assert torch.equal(posterior.sample(x, 4), network(x).double().expand(4, 6, 3))


class Returns(nn.Module):
    def __init__(self, wrap) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.network, self.wrap = mlp(), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.network(x))


@pytest.mark.parametrize(
    "wrap", [lambda t: SimpleNamespace(logits=t), lambda t: {"logits": t, "loss": None}]
)
def test_logits_are_found(wrap) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(6, 4)
    network = Returns(wrap)
    assert torch.equal(MAP(network)(x).mean, network.network(x))


def test_one_number_per_input_is_one_output() -> None:
    x = torch.randn(6, 4)
    assert MAP(Returns(lambda t: t[:, 0]))(x).mean.shape == (6, 1)


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (lambda t: (t, t), TypeError, "returned tuple"),
        (lambda t: t[:, :, None], ValueError, r"shape \(6, 3, 1\) for 6 inputs"),
        (lambda t: t[:3], ValueError, r"shape \(3, 3\) for 6 inputs"),
    ],
)
def test_other_outputs_are_refused(wrap, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        MAP(Returns(wrap))(torch.randn(6, 4))


class Rooted(Gaussian):
    """A covariance that is multiplied out in float32, and only when it is asked for."""

    def __init__(self, mean: Tensor, root: Tensor) -> None:
        self.mean, self._root, self.variance = mean, root, root.square().sum(-1)

    @property
    def covariance(self) -> Tensor:
        return self._root @ self._root.mT

    @property
    def row_sums(self) -> Tensor:
        return self.covariance.sum(-1)

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        epsilon = standard_normal((n_samples, *self.mean.shape), self.mean, generator)
        return (self._root @ epsilon.float()[..., None])[..., 0]


class FromOutside(rgpr.Posterior):
    """A posterior that somebody else wrote, without a thought of autocast."""

    def forward(self, x: Tensor) -> Gaussian:
        root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        return Rooted(self.point(x), root.expand(len(x), 4, 4))


def test_autocast_leaves_covariances_and_samples_from_outside_their_digits() -> None:
    x = torch.randn(20, 4)
    base = FromOutside(nn.Softplus())  # which autocast does not touch
    model = rgpr.RGPR(base, layers="input", likelihood="regression").fit([(x, x)])
    generator = torch.Generator()
    mean, covariance = model(x)
    samples = model.predictive_samples(x, 5, generator=generator.manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16  # it is on
        torch.testing.assert_close(model(x), (mean, covariance), rtol=0, atol=0)
        again = model.predictive_samples(x, 5, generator=generator.manual_seed(0))
        variances = model(x, diagonal_output=True)[1]
    assert torch.equal(again, samples)
    torch.testing.assert_close(variances, covariance.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0)
    labels = rgpr.RGPR(base, layers="input").fit([x])
    bridged = labels(x, link_approx="bridge")
    assert not torch.equal(bridged, labels(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(labels(x, link_approx="bridge"), bridged)
