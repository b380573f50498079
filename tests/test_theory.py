"""The paper's statements about RGPR as a whole, in float64. The kernel's are in test_kernels."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from networks import Task, blobs, convolutional, mlp
from rgpr import RGPR, Posterior
from rgpr.gaussian import DiagonalGaussian, Gaussian, symmetric_normal

ALPHAS = (1e4, 1e5, 1e6)


def network_number(index: int, outputs: int = 3) -> tuple[nn.Module, Tensor]:
    """A random network, every other one convolutional, and its training inputs."""
    generator = torch.Generator().manual_seed(index)
    torch.manual_seed(index)
    if index % 2:
        channels = int(torch.randint(1, 4, (), generator=generator))
        network: nn.Module = convolutional(outputs, channels=channels)
        shape: tuple[int, ...] = (channels, 8, 8)
    else:
        inputs, width, hidden = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((2, 12), (4, 40), (1, 5))
        )
        network, shape = mlp(inputs, outputs, width, hidden), (inputs,)
    return network.double(), torch.randn(40, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("index", range(100))
def test_variance_grows_cubically(index: int) -> None:
    """Lemma "Asymptotic Variance Growth": the log-log slope is 3 within one per cent."""
    network, x = network_number(index)
    model = RGPR(network).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        v = torch.stack([model.variance(alpha * x) for alpha in ALPHAS])
    slopes = v[1:].log10() - v[:-1].log10()
    assert ((slopes - 3).abs() < 0.03).all()


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("index", range(6))
def test_confidence_goes_to_one_over_c(classes: int, index: int) -> None:
    """Theorem "Uniform Asymptotic Confidence", at alpha = 1e8, for the probit."""
    network, x = network_number(index, classes)
    model = RGPR(network).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        p = model(1e8 * x)
        bare = network(1e8 * x).softmax(-1)
    assert (p - 1 / classes).abs().max() < 1e-3
    assert bare.amax(1).min() > 0.99  # the trouble that the theorem is about


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_confidence_goes_to_one_over_c_with_laplace(structure: str, classes: int) -> None:
    x, y = blobs(classes)
    network = mlp(4, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(network, "classification", "last_layer", structure)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    model = RGPR(la).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        assert (model(1e8 * x) - 1 / classes).abs().max() < 1e-3


def test_rate_of_the_limit() -> None:
    """m kappa falls like alpha^(-1/2), so the excess confidence does too."""
    network, x = network_number(0)
    model = RGPR(network).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        excess = torch.stack([model(a * x).amax(1) - 1 / 3 for a in (1e8, 1e10, 1e12)])
    slopes = (excess[1:] / excess[:-1]).log10() / 2
    torch.testing.assert_close(slopes, torch.full_like(slopes, -0.5), atol=0.02, rtol=0)


class _Widened(Posterior):
    def forward(self, x: Tensor) -> Gaussian:
        mean = self.point(x)
        return DiagonalGaussian(mean, mean.square().mean(1, keepdim=True))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 8), st.floats(0, 10), st.sampled_from([0.3, 1.0, 30.0]))
def test_arg_max_is_kept_where_variances_are_equal(
    index: int, classes: int, sigma2: float, alpha: float
) -> None:
    network, x = network_number(index, classes)
    model = RGPR(network).fit([x])
    model.sigma2 = sigma2
    with torch.no_grad():
        assert torch.equal(model(alpha * x).argmax(1), network(alpha * x).argmax(1))
        # A base with a variance of its own, equal across classes, changes nothing in that.
        widened = RGPR(_Widened(network)).fit([x])
        widened.sigma2 = sigma2
        assert torch.equal(widened(alpha * x).argmax(1), network(alpha * x).argmax(1))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0.01, 10))
def test_more_variance_means_less_confidence(index: int, sigma2: float) -> None:
    network, x = network_number(index)
    model = RGPR(network).fit([x])
    with torch.no_grad():
        confidences = []
        for scale in (0.0, sigma2, 2 * sigma2):
            model.sigma2 = scale
            confidences.append(model(5 * x).amax(1))
    assert (confidences[0] >= confidences[1]).all()
    assert (confidences[1] >= confidences[2]).all()


def test_the_data_region_is_quiet_and_hidden_layers_make_it_tighter() -> None:
    """Near zero at the center of the data; the input kernel alone grows slowly around it."""
    network, x = network_number(4)
    model = RGPR(network).fit([x])
    model.sigma2 = 1
    center = x.mean(0, keepdim=True)
    with torch.no_grad():
        input_alone = RGPR(network, layers="input").fit([x])
        input_alone.sigma2 = 1
        assert float(input_alone.variance(center)) < 1e-20
        assert (model.variance(x) > input_alone.variance(x)).all()


def test_two_halves_of_the_paper_agree_on_the_multi_output_covariance() -> None:
    """Equation (gp_posterior_multi): J^T Sigma J + k I, with J written out."""
    x, _ = blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(mlp(4, 2).double(), "regression", "all", "full", prior_precision=0.5)
        la.fit(DataLoader(TensorDataset(x.double(), torch.randn(120, 2).double()), batch_size=40))
    model = RGPR(la).fit([x.double()])
    from references import jacobian

    J = jacobian(la.model, x[:5].double())
    expected = J @ la.posterior_covariance @ J.mT
    expected = expected + model.variance(x[:5].double())[:, None, None] * torch.eye(2)
    torch.testing.assert_close(model(x[:5].double())[1], expected.detach())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh])
def test_only_linear_growth_of_the_mean_is_needed(activation: type[nn.Module]) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 4)).double()
    x = torch.randn(30, 3).double()
    model = RGPR(network).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        assert (model(1e10 * x) - 0.25).abs().max() < 1e-3
    assert math.isclose(float(model(x).sum()), 30)


class TestSymmetricMonteCarlo:
    """Noise in which every class wins equally often."""

    @pytest.mark.parametrize("classes", [2, 3, 10])
    @pytest.mark.parametrize("n_samples", [1, 2, 7, 10, 30, 101])
    def test_far_away(self, classes: int, n_samples: int) -> None:
        """Exactly 1/C if C divides S, at most ceil(S/C)/S otherwise; here, not on average."""
        x = torch.randn(40, 4)
        model = RGPR(mlp(4, classes)).fit([x])
        p = model(1e11 * x, link_approx="mc", n_samples=n_samples)
        limit = math.ceil(n_samples / classes) / n_samples
        assert p.amax(1).max() <= limit + 1e-4
        if n_samples % classes == 0:
            torch.testing.assert_close(p, torch.full_like(p, 1 / classes), atol=1e-4, rtol=0)

    def test_one_output(self) -> None:
        x = torch.randn(40, 4)
        model = RGPR(mlp(4, 1)).fit([x])
        p = model(1e11 * x, link_approx="mc", n_samples=2)
        torch.testing.assert_close(p, torch.full_like(p, 0.5), atol=1e-4, rtol=0)

    def test_unbiased(self) -> None:
        """Many small symmetric estimates against a million independent samples."""
        x = torch.randn(4, 4)
        model = RGPR(mlp()).fit([torch.randn(50, 4)])
        model.sigma2 = 3.0
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            reference = torch.zeros(4, 3).double()
            for _ in range(10):
                samples = model.predictive_samples(x, 100_000, generator, symmetric=False)
                reference += samples.softmax(-1).mean(0) / 10
            small = torch.stack(
                [
                    model(x, link_approx="mc", n_samples=5, generator=generator).double()
                    for _ in range(4000)
                ]
            )
        error = (small.mean(0) - reference).abs()
        assert (error < 5 * small.std(0) / 4000**0.5 + 3e-3).all()

    @pytest.mark.parametrize("sigma2", [1e-3, 0.1, 10.0])
    def test_never_a_larger_variance_on_digits(self, digits: Task, sigma2: float) -> None:
        model = RGPR(digits.network).fit(digits.loader())
        model.sigma2 = sigma2
        x = torch.cat([digits.x[:60], 2 * digits.x[:60], torch.rand(60, 64)])
        generator = torch.Generator().manual_seed(0)

        def spread(symmetric: bool) -> Tensor:
            with torch.no_grad():
                estimates = torch.stack(
                    [
                        model.predictive_samples(x, 20, generator, symmetric=symmetric)
                        .softmax(-1)
                        .mean(0)
                        for _ in range(300)
                    ]
                )
            return estimates.var(0).mean(1)

        symmetric, independent = spread(True), spread(False)
        # Where next to nothing varies, a variance of 300 numbers is that of its few rare ones.
        seen = independent > 1e-6
        ratio = (symmetric / independent)[seen]
        assert seen.sum() > 50
        assert ratio.mean() < 0.95
        # The ratio of two variances from 300 estimates each scatters by 12 % around the truth.
        assert ratio.quantile(0.95) < 1.2

    def test_shifts_have_the_law_of_independent_noise(self) -> None:
        noise = symmetric_normal(50_000, (1, 3), torch.zeros(1), torch.Generator().manual_seed(0))
        flat = noise[:, 0]
        torch.testing.assert_close(flat.mean(0), torch.zeros(3).double(), atol=0.03, rtol=0)
        torch.testing.assert_close(torch.cov(flat.T), torch.eye(3).double(), atol=0.05, rtol=0)
        assert symmetric_normal(7, (2, 3), torch.zeros(1), None).shape == (7, 2, 3)
