"""Autocast is for networks: what is computed from their features has all digits in spite of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rgpr.posteriors.gaussian import Gaussian

Answers = Callable[[Tensor], tuple[Tensor, ...]]


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.stack([x.sum(1).sin(), x[:, 0]], dim=1)


class Waves(nn.Module):
    """A network that autocast does not touch, so that the features are the same with it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(1).cos(), x[:, 1].sin()], dim=1)


def moments(gaussian: Gaussian) -> tuple[Tensor, ...]:
    return gaussian.mean, gaussian.variance


def laplace(structure: str) -> Answers:
    """The covariance alone: the mean is the network's own, with the digits that it has."""
    pytest.importorskip("laplace", reason="needs the extra laplace")
    from rgpr.posteriors import as_posterior, fit_laplace

    x, _ = data()
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 3), batch_size=40
    )
    la = fit_laplace(network, loader, subset="last_layer", structure=structure)
    posterior = as_posterior(la)

    def answers(x: Tensor) -> tuple[Tensor, ...]:
        gaussian = posterior(x)
        return gaussian.variance, gaussian.row_sums, gaussian.covariance

    return answers


def svgp() -> Answers:
    pytest.importorskip("gpytorch", reason="needs the extra gp")
    from rgpr.posteriors import SVGP

    posterior = SVGP.fit(*data(), epochs=5, progress=False)
    return lambda x: moments(posterior(x))


def exact_gp() -> Answers:
    """A model of the user's own, whose variance gpytorch computes when it is asked for."""
    gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gp")
    from rgpr.posteriors import SVGP

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            x, y = data()
            super().__init__(x, y[:, 0], gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    model = Exact().eval()

    def answers(x: Tensor) -> tuple[Tensor, ...]:
        model.prediction_strategy = None  # or what was computed without autocast would be kept
        return moments(SVGP(model)(x))

    return answers


def svdkl() -> Answers:
    pytest.importorskip("gpytorch", reason="needs the extra gp")
    from rgpr.posteriors import SVDKL

    x, y = data()
    posterior = SVDKL.fit(nn.Flatten(), [(x, y)], likelihood="regression", epochs=3, progress=False)
    return lambda x: moments(posterior(x))


def gp_residual(exact: bool) -> Answers:
    pytest.importorskip("gpytorch", reason="needs the extra gp")
    from rgpr.baselines.gp_residual import RIO

    posterior = RIO.fit(Waves(), [data()], "regression", exact=exact, epochs=3, progress=False)
    return lambda x: moments(posterior(x))


def knn() -> Answers:
    from rgpr.baselines.detectors import DETECTORS

    detector = DETECTORS["knn"](nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    detector.fit([(data()[0], torch.arange(120) % 3)], progress=False)
    return lambda x: (detector.predict_features(x),)


CASES: dict[str, Callable[[], Answers]] = {
    "last-layer Laplace, kron": lambda: laplace("kron"),
    "last-layer Laplace, diag": lambda: laplace("diag"),
    "last-layer Laplace, full": lambda: laplace("full"),
    "SVGP": svgp,
    "exact GP": exact_gp,
    "SVDKL": svdkl,
    "GP for the residuals, exact": lambda: gp_residual(True),
    "GP for the residuals, sparse": lambda: gp_residual(False),
    "nearest neighbours": knn,
}


@pytest.mark.parametrize("case", CASES)
def test_autocast_does_not_reach_what_is_made_of_features(case: str) -> None:
    answers = CASES[case]()
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = answers(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ x.T).dtype == torch.bfloat16  # it is on
            found = answers(x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
