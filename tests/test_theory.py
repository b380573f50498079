"""The paper's statements about RGPR as a whole, in float64. The kernel's are in test_kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from networks import Task, blobs, convolutional, mlp
from rgpr import RGPR, Posterior
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian, symmetric_normal

# The default residual is exactly zero at first, so it grows like a pure cube further out only.
ALPHAS = {"paper": (1e4, 1e5, 1e6), "onset": (1e6, 1e7, 1e8)}
both_residuals = pytest.mark.parametrize("residual", ["onset", "paper"])


def fitted(base: Any, x: Tensor, residual: str) -> RGPR:
    """The default residual with the scales that its fit finds; the paper's with scales of one."""
    model = RGPR(base, residual=residual).fit([x])
    if residual == "paper":
        model.sigma2 = 1
    return model


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


@both_residuals
@pytest.mark.parametrize("index", range(100))
def test_variance_grows_cubically(index: int, residual: str) -> None:
    """Lemma "Asymptotic Variance Growth": the log-log slope is 3 within one per cent."""
    network, x = network_number(index)
    model = fitted(network, x, residual)
    with torch.no_grad():
        v = torch.stack([model.variance(alpha * x) for alpha in ALPHAS[residual]])
    slopes = v[1:].log10() - v[:-1].log10()
    assert ((slopes - 3).abs() < 0.03).all()


@both_residuals
@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("index", range(6))
def test_confidence_goes_to_one_over_c(classes: int, index: int, residual: str) -> None:
    """Theorem "Uniform Asymptotic Confidence", at alpha = 1e8, for the probit."""
    network, x = network_number(index, classes)
    model = fitted(network, x, residual)
    with torch.no_grad():
        p = model(1e8 * x)
        bare = network(1e8 * x).softmax(-1)
    assert (p - 1 / classes).abs().max() < 1e-3
    assert bare.amax(1).min() > 0.99  # the trouble that the theorem is about


@both_residuals
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_confidence_goes_to_one_over_c_with_laplace(
    structure: str, classes: int, residual: str
) -> None:
    x, y = blobs(classes)
    network = mlp(4, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        la = Laplace(network, "classification", "last_layer", structure)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    model = fitted(la, x, residual)
    with torch.no_grad():
        assert (model(1e8 * x) - 1 / classes).abs().max() < 1e-3


@both_residuals
def test_rate_of_the_limit(residual: str) -> None:
    """m kappa falls like alpha^(-1/2), so the excess confidence does too."""
    network, x = network_number(0)
    model = fitted(network, x, residual)
    with torch.no_grad():
        excess = torch.stack([model(a * x).amax(1) - 1 / 3 for a in (1e8, 1e10, 1e12)])
    slopes = (excess[1:] / excess[:-1]).log10() / 2
    torch.testing.assert_close(slopes, torch.full_like(slopes, -0.5), atol=0.02, rtol=0)


class _Widened(Posterior):
    def forward(self, x: Tensor) -> Gaussian:
        mean = self.point(x)
        return DiagonalGaussian(mean, mean.square().mean(1, keepdim=True))


class _Uneven(Posterior):
    """Classes are unsure to different degrees: their variances are 0, 1, 4, 9 and so on."""

    def forward(self, x: Tensor) -> Gaussian:
        mean = self.point(x)
        return DiagonalGaussian(mean, torch.arange(mean.shape[1]).double().square())


@settings(max_examples=30)
@given(
    st.integers(0, 1000),
    st.integers(2, 8),
    st.floats(0, 10),
    st.sampled_from([0.3, 1.0, 30.0]),
    st.sampled_from(["onset", "paper"]),
)
def test_arg_max_is_kept_where_variances_are_equal(
    index: int, classes: int, sigma2: float, alpha: float, residual: str
) -> None:
    network, x = network_number(index, classes)
    model = RGPR(network, residual=residual).fit([x])
    model.sigma2 = sigma2
    with torch.no_grad():
        assert torch.equal(model(alpha * x).argmax(1), network(alpha * x).argmax(1))
        # A base with a variance of its own, equal across classes, changes nothing in that.
        widened = RGPR(_Widened(network), residual=residual).fit([x])
        widened.sigma2 = sigma2
        assert torch.equal(widened(alpha * x).argmax(1), network(alpha * x).argmax(1))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 8), st.floats(0, 10), st.sampled_from([0.3, 1.0, 30.0]))
def test_the_default_keeps_the_bases_arg_max_also_where_variances_differ(
    index: int, classes: int, sigma2: float, alpha: float
) -> None:
    """The default residual divides all of the base's logits by one number."""
    network, x = network_number(index, classes)
    model = RGPR(_Uneven(network)).fit([x])
    with torch.no_grad():
        model.sigma2 = 0
        base = model(alpha * x).argmax(1)
        model.sigma2 = sigma2
        assert torch.equal(model(alpha * x).argmax(1), base)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0.01, 10), st.sampled_from(["onset", "paper"]))
def test_more_variance_means_less_confidence(index: int, sigma2: float, residual: str) -> None:
    network, x = network_number(index)
    model = RGPR(network, residual=residual).fit([x])
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
    model = fitted(network, x, "paper")
    center = x.mean(0, keepdim=True)
    with torch.no_grad():
        input_alone = RGPR(network, layers="input", residual="paper").fit([x])
        input_alone.sigma2 = 1
        assert float(input_alone.variance(center)) < 1e-20
        assert (model.variance(x) > input_alone.variance(x)).all()


@pytest.mark.parametrize("index", range(10))
def test_the_default_is_exactly_the_base_around_the_data(index: int) -> None:
    """At nearly all training inputs there is no variance whatsoever."""
    network, x = network_number(index)
    model = RGPR(network).fit([x])
    with torch.no_grad():
        quiet = model.variance(x) == 0
        assert quiet.double().mean() >= 0.95
        assert torch.equal(model(x)[quiet], network(x).softmax(-1)[quiet])


@both_residuals
def test_two_halves_of_the_paper_agree_on_the_multi_output_covariance(residual: str) -> None:
    """Equation (gp_posterior_multi): J^T Sigma J + k I, with J written out."""
    x, _ = blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        la = Laplace(mlp(4, 2).double(), "regression", "all", "full", prior_precision=0.5)
        la.fit(DataLoader(TensorDataset(x.double(), torch.randn(120, 2).double()), batch_size=40))
    model = RGPR(la, residual=residual).fit([x.double()])
    from references import jacobian

    x = 10 * x[:5].double()  # beyond the onset of the default residual
    v = model.variance(x)
    assert v.min() > 0
    J = jacobian(la.model, x)
    expected = J @ la.posterior_covariance @ J.mT
    expected = expected + v[:, None, None] * torch.eye(2)
    torch.testing.assert_close(model(x)[1], expected.detach())


@both_residuals
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh])
def test_only_linear_growth_of_the_mean_is_needed(
    activation: type[nn.Module], residual: str
) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 4)).double()
    x = torch.randn(30, 3).double()
    model = fitted(network, x, residual)
    with torch.no_grad():
        assert (model(1e10 * x) - 0.25).abs().max() < 1e-3
        assert math.isclose(float(model(x).sum()), 30)


class TestSymmetricMonteCarlo:
    """Noise in which every class wins equally often."""

    @both_residuals
    @pytest.mark.parametrize("classes", [2, 3, 10])
    @pytest.mark.parametrize("n_samples", [1, 2, 7, 10, 30, 101])
    def test_far_away(self, classes: int, n_samples: int, residual: str) -> None:
        """Exactly 1/C if C divides S, at most ceil(S/C)/S otherwise; here, not on average."""
        x = torch.randn(40, 4)
        model = RGPR(mlp(4, classes), residual=residual).fit([x])
        p = model(1e11 * x, link_approx="mc", n_samples=n_samples)
        limit = math.ceil(n_samples / classes) / n_samples
        assert p.amax(1).max() <= limit + 1e-4
        if n_samples % classes == 0:
            torch.testing.assert_close(p, torch.full_like(p, 1 / classes), atol=1e-4, rtol=0)

    @both_residuals
    def test_one_output(self, residual: str) -> None:
        x = torch.randn(40, 4)
        model = RGPR(mlp(4, 1), likelihood="classification", residual=residual).fit([x])
        p = model(1e11 * x, link_approx="mc", n_samples=2)
        torch.testing.assert_close(p, torch.full_like(p, 0.5), atol=1e-4, rtol=0)

    @both_residuals
    def test_unbiased(self, residual: str) -> None:
        """Many small symmetric estimates against a million independent samples."""
        x = torch.randn(4, 4)
        model = RGPR(mlp(), residual=residual).fit([torch.randn(50, 4)])
        if residual == "paper":
            model.sigma2 = 3.0
        else:
            x = 10 * x  # beyond the onset
        assert_unbiased(model, x)

    @pytest.mark.parametrize("base", ["map", "laplace"])
    @pytest.mark.parametrize("sigma2", [1e-3, 0.1, 10.0])
    def test_never_a_larger_variance_on_digits(
        self, digits: Task, sigma2: float, base: str
    ) -> None:
        """Of bases whose samples are independent of each other."""
        network: Any = digits.network
        if base == "laplace":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from laplace import Laplace

                network = Laplace(network, "classification", "last_layer", "kron")
                network.fit(digits.loader())
        model = RGPR(network, residual="paper").fit(digits.loader())
        model.sigma2 = sigma2
        x = torch.cat([digits.x[:60], 2 * digits.x[:60], torch.rand(60, 64)])
        symmetric, independent = (
            spread_of_means(model, x, 20, symmetric=which).mean(1) for which in (True, False)
        )
        # Where next to nothing varies, a variance of 300 numbers is that of its few rare ones.
        # The base's own samples of a Laplace approximation are rare ones too.
        seen = independent > (1e-6 if base == "map" else 1e-4)
        ratio = (symmetric / independent)[seen]
        assert seen.sum() > 50
        assert ratio.mean() < 0.95
        # The ratio of two variances from 300 estimates each scatters by 12 % around the truth.
        assert ratio.quantile(0.95) < 1.2

    def test_an_ensemble_is_unbiased_and_exact_far_away(self) -> None:
        """Its members come in turn, and each meets every class of the noise equally often."""
        x = torch.randn(4, 4)
        model = RGPR([mlp(), mlp()]).fit([torch.randn(50, 4)])
        assert_unbiased(model, 10 * x, n_samples=6)
        p = model(1e11 * x, link_approx="mc", n_samples=6)
        torch.testing.assert_close(p, torch.full_like(p, 1 / 3), atol=1e-4, rtol=0)

    def test_an_ensembles_probabilities_have_hardly_a_larger_variance(self) -> None:
        """Members in turn are not independent samples, so the claim above is not about them.

        Their samples are fixed, and the noise of two different members within a block is
        correlated by how differently they respond to it. The variance of the probabilities was
        measured relative to independent noise: 0.41 for two members that disagree about two
        classes. The largest ratio that a search over the logits of two members found is 1.012,
        with three classes and two samples, where one member doubts between the first two classes
        and the other one between the first and the last.
        """
        model, x = constant_ensemble([(1.5, 0.0), (0.0, 1.5)], deviation=1.0)
        ratio = variance_ratio(model, x, 2, lambda p: p)
        torch.testing.assert_close(ratio, torch.full((2,), 0.406).double(), atol=0.01, rtol=0)
        model, x = constant_ensemble([(0.0, -7.5, -1e4), (0.0, -1e4, -7.5)], deviation=3.0)
        ratio = variance_ratio(model, x, 2, lambda p: p)
        assert ratio.max() < 1.03

    @pytest.mark.parametrize("n_samples", [2, 10])
    def test_other_means_over_an_ensembles_samples_can_have_a_larger_variance(
        self, n_samples: int
    ) -> None:
        """The mean confidence of the samples: 1.70 times the variance of independent noise.

        Two members disagree about two classes. What makes one of them surer makes the other one
        less sure, and symmetric noise always gives one what it denies the other. With two classes
        no function of the samples has more than twice the variance.
        """
        model, x = constant_ensemble([(1.5, 0.0), (0.0, 1.5)], deviation=1.0)
        ratio = float(variance_ratio(model, x, n_samples, lambda p: p.amax(-1)))
        assert ratio == pytest.approx(1.70, abs=0.03)

    def test_shifts_have_the_law_of_independent_noise(self) -> None:
        noise = symmetric_normal(50_000, (1, 3), torch.zeros(1), torch.Generator().manual_seed(0))
        flat = noise[:, 0]
        torch.testing.assert_close(flat.mean(0), torch.zeros(3).double(), atol=0.03, rtol=0)
        torch.testing.assert_close(torch.cov(flat.T), torch.eye(3).double(), atol=0.05, rtol=0)
        assert symmetric_normal(7, (2, 3), torch.zeros(1), None).shape == (7, 2, 3)


def constant_ensemble(logits: Sequence[Sequence[float]], deviation: float) -> tuple[RGPR, Tensor]:
    """Members that say the same everywhere, and an input where the noise has this deviation."""
    members = []
    for row in logits:
        member = nn.Linear(1, len(row))
        nn.init.zeros_(member.weight)
        member.bias.data = torch.tensor(row)
        members.append(member)
    model = RGPR(members, layers="input", residual="paper").fit([torch.randn(50, 1)])
    x = torch.full((1, 1), 3.0)
    model.sigma2 = 1.0
    model.sigma2 = deviation**2 / float(model.variance(x).detach())
    return model, x


def variance_ratio(
    model: RGPR, x: Tensor, n_samples: int, of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Of the mean over samples of a function: symmetric noise relative to independent noise.

    Rows do not know of each other, so that many copies of one input give many estimates.
    """
    rows = x.expand(200_000, 1)

    def spread(symmetric: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            samples = model.predictive_samples(rows, n_samples, generator, symmetric=symmetric)
        return of(samples.softmax(-1)).mean(0).var(0)

    return spread(True) / spread(False)


def assert_unbiased(model: RGPR, x: Tensor, n_samples: int = 5) -> None:
    """The mean of 4000 symmetric estimates, and that of a million independent samples."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        assert model.variance(x).min() > 0
        reference = 0.0
        for _ in range(10):
            samples = model.predictive_samples(x, 100_000, generator, symmetric=False)
            reference += samples.softmax(-1).mean(0) / 10
        # Rows do not know of each other: copies of the inputs give independent estimates.
        copies = x.repeat(4000, 1)
        small = model(copies, link_approx="mc", n_samples=n_samples, generator=generator)
    small = small.double().reshape(4000, len(x), -1)
    error = (small.mean(0) - reference).abs()
    assert (error < 5 * small.std(0) / 4000**0.5 + 3e-3).all()


def spread_of_means(
    model: RGPR,
    x: Tensor,
    n_samples: int,
    *,
    symmetric: bool,
    repeats: int = 300,
    of: Callable[[Tensor], Tensor] = lambda p: p,
) -> Tensor:
    """The variance of the mean over samples of a function of their probabilities."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        means = [
            of(
                model.predictive_samples(x, n_samples, generator, symmetric=symmetric).softmax(-1)
            ).mean(0)
            for _ in range(repeats)
        ]
    return torch.stack(means).var(0)
