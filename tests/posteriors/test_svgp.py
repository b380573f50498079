from __future__ import annotations

import gpytorch
import pytest
import torch
from torch import Tensor, nn

import rgpr
from rgpr.posteriors import SVGP
from rgpr.posteriors.svgp import RBFKernel


def wave(n: int = 100) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, n)[:, None]
    return x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(n)


@pytest.fixture(scope="module")
def fitted() -> tuple[SVGP, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = wave()
    return SVGP.fit(x, y, inducing=20, lr=0.05, progress=False), x, y


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Multitask(ExactGP):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
        kernel = gpytorch.kernels.RBFKernel()
        self.covar_module = gpytorch.kernels.MultitaskKernel(kernel, num_tasks=2)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultitaskMultivariateNormal:
        return gpytorch.distributions.MultitaskMultivariateNormal(
            self.mean_module(x), self.covar_module(x)
        )


def exact(gram, noise: Tensor, x: Tensor, y: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """The textbook's posterior of a GP with zero mean, in float64."""
    inverse = torch.linalg.inv(gram(x, x) + noise * torch.eye(len(x)))
    cross = gram(x, new)
    covariance = gram(new, new) - cross.T @ inverse @ cross
    return cross.T @ inverse @ y, covariance.diagonal()


def test_close_to_the_exact_gp_with_its_hyperparameters(
    fitted: tuple[SVGP, Tensor, Tensor],
) -> None:
    posterior, x, y = fitted
    model = posterior.network
    scale = model.covar_module.outputscale.double()
    lengthscale = model.covar_module.base_kernel.lengthscale.double()
    constant = model.mean_module.constant.double()

    def gram(a: Tensor, b: Tensor) -> Tensor:
        return scale * (-0.5 * ((a - b.T) / lengthscale).square()).exp()

    new = torch.linspace(-2.5, 2.5, 31)[:, None]
    residual = y.double() - constant
    mean, variance = exact(gram, posterior.noise.double(), x.double(), residual, new.double())
    gaussian = posterior(new)
    assert gaussian.mean.shape == gaussian.variance.shape == (31, 1)
    torch.testing.assert_close(gaussian.mean[:, 0].double(), mean + constant, atol=0.05, rtol=0)
    torch.testing.assert_close(gaussian.variance[:, 0].sqrt(), variance.sqrt(), atol=0.05, rtol=0)


def test_below_the_residual(fitted: tuple[SVGP, Tensor, Tensor]) -> None:
    posterior, x, _ = fitted
    model = rgpr.RGPR(posterior).fit([x])
    assert model.likelihood == "regression"
    assert model.layers == ["input"]
    model.sigma2 = 1.0
    small, large = (model(a * x[:1], diagonal_output=True)[1] for a in (1e5, 1e7))
    torch.testing.assert_close(large / small, torch.full((1, 1), 1e6).double(), rtol=1e-3, atol=0)
    model.sigma2 = 0.0
    mean, variance = model(x, diagonal_output=True)
    gaussian = posterior(x)
    assert torch.equal(mean, gaussian.mean)
    assert torch.equal(variance, gaussian.variance)
    with pytest.raises(TypeError, match="SVGP cannot be saved: it predicts through"):
        model.save("never.safetensors")


def test_rows_do_not_touch_each_other(fitted: tuple[SVGP, Tensor, Tensor]) -> None:
    posterior, x, _ = fitted
    together = posterior(torch.cat([x[:5], 1e30 * x[:1]]))
    torch.testing.assert_close(together.mean[:5], posterior(x[:5]).mean)
    assert together.mean.isfinite().all()


def test_fitting_is_seeded_and_leaves_the_global_generator() -> None:
    x, y = wave(30)
    before = torch.get_rng_state()
    first, again, other = (
        SVGP.fit(x, y, inducing=5, epochs=3, progress=False, seed=s)(x).mean for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_several_outputs() -> None:
    x, y = wave(60)
    targets = torch.stack([y, 3 - 2 * y], dim=1)
    posterior = SVGP.fit(x, targets, inducing=15, epochs=400, lr=0.03, progress=False)
    gaussian = posterior(x)
    assert gaussian.mean.shape == gaussian.variance.shape == targets.shape
    assert ((gaussian.mean - targets).square().mean(0) < torch.tensor([0.05, 0.2])).all()
    assert posterior.noise.shape == (2,)


@pytest.mark.parametrize(("kind", "outputs"), [(ExactGP, 1), (Multitask, 2)])
def test_a_gpytorch_model_is_wrapped(kind: type[ExactGP], outputs: int) -> None:
    x, y = wave(20)
    model = kind(x, y if outputs == 1 else torch.stack([y, -y], dim=1))
    with pytest.raises(ValueError, match=r"training mode.*call model.eval\(\)"):
        rgpr.as_posterior(model)
    posterior = rgpr.as_posterior(model.eval())
    assert isinstance(posterior, SVGP)
    new = torch.randn(7, 1)
    gaussian = posterior(new)
    expected = model(new)
    torch.testing.assert_close(gaussian.mean, expected.mean.reshape(7, outputs))
    torch.testing.assert_close(gaussian.variance.float(), expected.variance.reshape(7, outputs))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    fitted = rgpr.RGPR(model).fit([new])
    assert fitted.layers == ["input"]
    assert not model.training
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_rounding_below_zero_is_clamped() -> None:
    x = torch.linspace(0, 1, 200)[:, None]
    model = ExactGP(x, x[:, 0]).eval()
    model.likelihood.noise = 1e-4
    assert (rgpr.as_posterior(model)(x + 1e-6).variance >= 0).all()


def test_casting_forgets_what_gpytorch_remembers(fitted: tuple[SVGP, Tensor, Tensor]) -> None:
    x, y = wave(20)
    posterior = rgpr.as_posterior(ExactGP(x, y).eval())
    expected = posterior(x[:4] + 0.1).mean
    doubled = posterior.double()(x[:4].double() + 0.1).mean
    assert doubled.dtype == torch.float64
    torch.testing.assert_close(doubled.float(), expected, atol=1e-3, rtol=0)


def test_kernel_agrees_with_gpytorch() -> None:
    x, z = torch.randn(5, 3).double(), torch.randn(4, 3).double()
    for dimensions in (None, 3):
        ours = RBFKernel(ard_num_dims=dimensions, batch_shape=torch.Size([2])).double()
        theirs = gpytorch.kernels.RBFKernel(
            ard_num_dims=dimensions, batch_shape=torch.Size([2])
        ).double()
        lengthscale = torch.rand(2, 1, dimensions or 1).double() + 0.5
        ours.lengthscale = theirs.lengthscale = lengthscale
        torch.testing.assert_close(ours(x, z).to_dense(), theirs(x, z).to_dense())
        torch.testing.assert_close(ours(x, diag=True), theirs(x, diag=True))


def test_errors(fitted: tuple[SVGP, Tensor, Tensor]) -> None:
    posterior, x, y = fitted
    with pytest.raises(ValueError, match="a gpytorch model has no layers"):
        rgpr.RGPR(posterior, layers=lambda name, module: True).fit([x])
    with pytest.raises(TypeError, match="returned Tensor; expected gpytorch's"):
        SVGP(nn.Linear(1, 1).eval())(x)
    with pytest.raises(ValueError, match=r"inputs have shape \(100,\)"):
        SVGP.fit(x[:, 0], y)
    with pytest.raises(ValueError, match="not finite"):
        SVGP.fit(x, y / 0)
    with pytest.raises(ValueError, match=r"dtype torch.int64"):
        SVGP.fit(x.long(), y)
