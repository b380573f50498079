from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr.posteriors import MAP
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian


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
