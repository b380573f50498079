from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from networks import Task, mlp
from rgpr import RGPR
from rgpr.answers import probabilities
from rgpr.answers.probabilities import flatness
from rgpr.likelihoods.classification import Classification, softmax
from rgpr.posteriors.gaussian import DenseGaussian, DiagonalGaussian, Gaussian
from rgpr.posteriors.links import LINKS, bridge, probit, probit_logits


def monte_carlo(samples: Tensor) -> Tensor:
    """Class probabilities of samples, none of which are at the limit."""
    limit = torch.zeros(samples.shape[1], dtype=torch.bool)
    return probabilities.monte_carlo(Classification(), samples, limit)


def twice_probit(gaussian: Gaussian, beyond: Tensor, temperature: float = 1.0) -> Tensor:
    """The base's probit, and the probit once more for the residual."""
    logits = LINKS["probit"].logits(gaussian, torch.zeros_like(beyond), temperature)
    return softmax((logits * flatness(beyond)).to(gaussian.mean.dtype))


def random_gaussian(classes: int, seed: int = 0, spread: float = 1.0) -> DenseGaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(6, classes, generator=generator, dtype=torch.float64)
    root = spread * torch.randn(6, classes, classes, generator=generator, dtype=torch.float64)
    return DenseGaussian(mean, root @ root.mT / classes)


def test_probit_is_the_papers_formula() -> None:
    gaussian, v = random_gaussian(4), torch.rand(6).double()
    variance = gaussian.covariance + v[:, None, None] * torch.eye(4)
    expected = torch.empty(6, 4, dtype=torch.float64)
    for b in range(6):
        kappa = [1 / math.sqrt(1 + math.pi / 8 * variance[b, i, i]) for i in range(4)]
        weights = [math.exp(gaussian.mean[b, i] * kappa[i]) for i in range(4)]
        expected[b] = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(probit(gaussian, v), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["classification", "multilabel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_answer_once(likelihood: str, dtype: torch.dtype) -> None:
    """Without variance the answer is torch's own; differences of logits were rounded before."""
    network, x = mlp(4, 7, width=32), torch.randn(300, 4)
    with torch.no_grad():
        network[-1].weight *= 20
        network.to(dtype)
        model = RGPR(network, likelihood=likelihood).fit([x.to(dtype)], progress=False)
        model.sigma2 = 0.0
        outputs = network(x.to(dtype))
        expected = outputs.softmax(1) if likelihood == "classification" else outputs.sigmoid()
        assert torch.equal(model(x.to(dtype)), expected)


def test_probit_of_a_point_is_its_softmax_bit_by_bit() -> None:
    mean = torch.randn(6, 4)
    gaussian = DiagonalGaussian(mean, torch.zeros(()))
    assert torch.equal(probit(gaussian, torch.zeros(6).double()), mean.softmax(-1))


def test_twice_probit_is_its_formula() -> None:
    gaussian, beyond, T = random_gaussian(4), 3 * torch.rand(6).double(), 1.7
    expected = torch.empty(6, 4, dtype=torch.float64)
    for b in range(6):
        base = [
            float(gaussian.mean[b, i])
            / math.sqrt(1 + math.pi / 8 * float(gaussian.covariance[b, i, i]))
            for i in range(4)
        ]
        weights = [math.exp(t / T / math.sqrt(1 + float(beyond[b]))) for t in base]
        expected[b] = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(twice_probit(gaussian, beyond, T), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_twice_probit_without_variance_is_the_bases_probit_bit_by_bit(
    dtype: torch.dtype, outputs: int, temperature: float
) -> None:
    mean, zeros = 5 * torch.randn(50, outputs).to(dtype), torch.zeros(50).double()
    uneven = DiagonalGaussian(mean, 9 * torch.rand(50, outputs))
    heat = torch.tensor(temperature).double()
    p = twice_probit(uneven, zeros, heat)
    assert p.dtype == dtype
    assert torch.equal(p, probit(uneven, zeros, heat))
    point = DiagonalGaussian(mean, torch.zeros(()))
    assert torch.equal(twice_probit(point, zeros, heat), probit(point, zeros, heat))


def uneven_gaussian(classes: int, seed: int) -> DiagonalGaussian:
    """Means and variances of very different sizes; the second half repeats some classes."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(20, classes, generator=generator, dtype=torch.float64)
    variance = (6 * torch.randn(20, classes, generator=generator, dtype=torch.float64)).exp()
    again = torch.randint(classes, (classes,), generator=generator)
    again[0] = again[-1]  # at least one class is there twice
    mean[10:], variance[10:] = mean[10:, again], variance[10:, again]
    return DiagonalGaussian(mean, variance)


@given(
    st.integers(2, 12),
    st.integers(0, 10**6),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e9, 1e30]),
    st.sampled_from([0.3, 1.0, 4.0]),
)
def test_twice_probit_keeps_the_order_of_classes_and_ties(
    classes: int, seed: int, size: float, temperature: float
) -> None:
    """By one number all logits are divided: no two of them change places."""
    gaussian = uneven_gaussian(classes, seed)
    beyond = size * torch.rand(20, generator=torch.Generator().manual_seed(seed)).double()
    base = probit_logits(gaussian.mean, gaussian.variance)
    p = twice_probit(gaussian, beyond, temperature)
    larger = base[:, :, None] > base[:, None, :]
    equal = base[:, :, None] == base[:, None, :]
    assert equal.sum() > 20 * classes  # there are ties, beyond each class with itself
    assert (p[:, :, None] >= p[:, None, :])[larger].all()
    assert (p[:, :, None] == p[:, None, :])[equal].all()
    # It is strictly so, wherever probabilities can tell the logits apart.
    apart = larger & ((base[:, :, None] - base[:, None, :]) > 1e-3)
    if size <= 1e3:
        assert (p[:, :, None] > p[:, None, :])[apart].all()


def test_the_probit_of_the_same_variance_may_change_the_order() -> None:
    """The first class is the base's, since the second one is too unsure; then both are unsure."""
    gaussian = DiagonalGaussian(torch.tensor([[1.0, 1.2]]), torch.tensor([[0.0, 10.0]]))
    v = torch.full((1,), 100.0, dtype=torch.float64)
    nothing = torch.zeros_like(v)
    assert probit(gaussian, nothing).argmax(1) == 0
    assert probit(gaussian, v).argmax(1) == 1
    assert twice_probit(gaussian, math.pi / 8 * v).argmax(1) == 0
    # Two equal logits stay so.
    equal = DiagonalGaussian(torch.tensor([[2.0, 2.0]]), torch.tensor([[3.0, 3.0]]))
    p = twice_probit(equal, v)
    assert p[0, 0] == p[0, 1] == 0.5


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_twice_probit_goes_to_the_uniform_distribution(classes: int) -> None:
    gaussian = DiagonalGaussian(10 * torch.randn(20, classes).double(), torch.rand(20, classes))
    sizes = (0.0, 1e-3, 1.0, 1e3, 1e6, 1e12, 1e24)
    p = torch.stack([twice_probit(gaussian, torch.full((20,), size).double()) for size in sizes])
    confidence = p.amax(2)
    assert (confidence[1:] < confidence[:-1])[:5].all()
    excess = confidence - 1 / p.shape[2]
    # Its excess falls with the root.
    rate = (excess[5] / excess[4]).log10()
    torch.testing.assert_close(rate, torch.full_like(rate, -3.0), atol=0.01, rtol=0)
    assert excess[6].max() < 1e-9
    limit = twice_probit(gaussian, torch.full((20,), torch.inf).double())
    assert torch.equal(limit, torch.full_like(limit, 1 / limit.shape[1]))


def test_both_probits_agree_where_the_base_is_certain() -> None:
    """Without a variance of the base's own there is only one to divide by."""
    gaussian = DiagonalGaussian(torch.randn(6, 4).double(), torch.zeros(()))
    v = 10 * torch.rand(6).double()
    torch.testing.assert_close(twice_probit(gaussian, math.pi / 8 * v), probit(gaussian, v))


def test_monte_carlo_is_the_mean_of_softmaxes() -> None:
    samples = torch.randn(7, 5, 3)
    torch.testing.assert_close(monte_carlo(samples), samples.softmax(-1).mean(0))


def laplace_torch_bridge(gaussian: DenseGaussian, v: Tensor, normalise: bool) -> Tensor:
    """The formula as laplace-torch writes it, covariance matrices and all."""
    mean, K = gaussian.mean.clone(), gaussian.mean.shape[1]
    f_var = gaussian.covariance + v[:, None, None] * torch.eye(K)
    mean -= f_var.sum(-1) * mean.sum(-1)[:, None] / f_var.sum((1, 2))[:, None]
    f_var = (
        f_var
        - torch.einsum("bi,bj->bij", f_var.sum(-1), f_var.sum(-2))
        / f_var.sum((1, 2))[:, None, None]
    )
    diagonal = f_var.diagonal(dim1=1, dim2=2)
    if normalise:
        scale = diagonal.mean(1) / math.sqrt(K / 2)
        mean, diagonal = mean / scale.sqrt()[:, None], diagonal / scale[:, None]
    alpha = (1 - 2 / K + mean.exp() / K**2 * (-mean).exp().sum(1)[:, None]) / diagonal
    return alpha / alpha.sum(1)[:, None]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_bridge_is_laplace_torchs_bridge_for_small_and_bridge_norm_for_large_variance(
    classes: int,
) -> None:
    small, zero = random_gaussian(classes, spread=0.1), torch.zeros(6).double()
    torch.testing.assert_close(bridge(small, zero), laplace_torch_bridge(small, zero, False))
    large, v = random_gaussian(classes, spread=5.0), torch.full((6,), 100.0).double()
    torch.testing.assert_close(bridge(large, v), laplace_torch_bridge(large, v, True))


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("prior_precision", [0.1, 1.0, 10.0, 100.0])
def test_bridge_is_laplace_torchs_own(digits: Task, structure: str, prior_precision: float) -> None:
    """With the residual off, on a last-layer Laplace, to 1e-5 and exactly where it is said.

    With s the mean projected variance divided by sqrt(K / 2), ours is laplace-torch's "bridge"
    where s is at most one, and its "bridge_norm" elsewhere. The two meet at s = 1. Where the
    variance is large, "bridge" and ours differ by as much as 0.81 in these tests.
    """
    network = copy.deepcopy(digits.network).double()
    x, y = digits.train.tensors
    loader = DataLoader(TensorDataset(x.double(), y), batch_size=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        la = Laplace(
            network, "classification", "last_layer", structure, prior_precision=prior_precision
        )
        la.fit(loader)
    model = RGPR(la).fit(loader)
    model.sigma2 = 0
    x = torch.cat([digits.x[:150], 3 * digits.x[:50], torch.rand(50, 64)]).double()
    with torch.no_grad():
        ours = model(x, link_approx="bridge")
        plain, normalised = (la(x, link_approx=link) for link in ("bridge", "bridge_norm"))
        small = projected_variance(model.posterior(x)) <= math.sqrt(10 / 2)
    torch.testing.assert_close(ours[small], plain[small], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[~small], normalised[~small], atol=1e-5, rtol=0)
    # Both kinds of rows are seen, and they are not the same question asked twice.
    if (structure, prior_precision) == ("kron", 10.0):
        assert 50 < small.sum() < 200
        assert (ours - plain)[~small].abs().max() > 0.1
        assert (ours - normalised)[small].abs().max() > 0.1


def projected_variance(gaussian: Gaussian) -> Tensor:
    """The mean variance of the outputs once they are projected on a sum of zero, ``(B,)``."""
    covariance = gaussian.covariance
    sums = covariance.sum(-1)
    projected = covariance - sums[:, :, None] * sums[:, None, :] / sums.sum(1)[:, None, None]
    return projected.diagonal(dim1=1, dim2=2).mean(1)


def test_bridge_far_away_where_laplace_torch_gives_ones() -> None:
    gaussian = DenseGaussian(1e20 * torch.randn(6, 10).double(), torch.zeros(6, 10, 10))
    p = bridge(gaussian, torch.full((6,), 1e60, dtype=torch.float64))
    torch.testing.assert_close(p, torch.full((6, 10), 0.1).double(), rtol=1e-6, atol=0)


def test_bridge_of_a_covariance_that_the_projection_takes_away() -> None:
    """All logits shift together: no uncertainty about the class at all."""
    covariance = torch.rand(6, 1, 1).double().expand(6, 3, 3)
    p = bridge(DenseGaussian(torch.randn(6, 3).double(), covariance), torch.zeros(6).double())
    assert p.isfinite().all()
    torch.testing.assert_close(p.sum(1), torch.ones(6).double())


@pytest.mark.parametrize("seed", range(3))
def test_bridge_of_a_covariance_of_which_only_rounding_is_left(seed: int) -> None:
    """Every class shares nearly all of its variance, and what is left is a few last digits.

    Rounded differences may be zero or negative, and without a floor such a class would have no
    probability and the others all of it.
    """
    generator = torch.Generator().manual_seed(seed)
    root = 1e-4 * torch.randn(1, 5, 5, generator=generator, dtype=torch.float64)
    shared = 1e9 * (0.3 + torch.rand(1, generator=generator, dtype=torch.float64))
    mean = torch.zeros(1, 5, dtype=torch.float64)
    p = bridge(DenseGaussian(mean, root @ root.mT + shared), torch.zeros(1).double())
    torch.testing.assert_close(p, torch.full_like(p, 0.2), rtol=1e-6, atol=0)


def test_bridge_without_variance_is_the_softmax() -> None:
    mean = torch.randn(6, 4)
    gaussian = DiagonalGaussian(mean, torch.zeros(()))
    torch.testing.assert_close(bridge(gaussian, torch.zeros(6).double()), mean.softmax(-1))


def test_bridge_divides_the_outputs_by_the_temperature() -> None:
    """A bridge at T is that of the outputs divided by T, digit by digit in float64."""
    T, v = 1.7, torch.linspace(0.1, 2, 6).double()
    for spread in (0.1, 5.0):
        gaussian = random_gaussian(4, spread=spread)
        cooled = DenseGaussian(gaussian.mean / T, gaussian.covariance / T**2)
        expected = bridge(cooled, v / T**2)
        torch.testing.assert_close(bridge(gaussian, v, T), expected, rtol=1e-12, atol=0)


def test_bridge_of_one_output_is_its_formula() -> None:
    """-f/2 and f/2 have equal variances V/4, so the odds are those of f / sqrt(max(1, V/4))."""
    mean, v = torch.linspace(-4, 4, 9)[:, None].double(), torch.linspace(0.1, 30, 9).double()
    p = bridge(DiagonalGaussian(mean, torch.tensor(0.5).double()), v)
    expected = torch.sigmoid(mean[:, 0] / ((0.5 + v) / 4).clamp_min(1).sqrt())
    torch.testing.assert_close(p[:, 1], expected)


def test_bridge_logits_without_variance_are_the_mean_bit_by_bit() -> None:
    mean = torch.randn(6, 4)
    nothing = DiagonalGaussian(mean, torch.zeros(()))
    logits = LINKS["bridge"].logits(nothing, torch.zeros(6).double(), 1.0)
    assert torch.equal(logits, mean.double())


def test_bridge_of_a_class_without_variance_does_not_depend_on_the_variances_unit() -> None:
    """Variances that are small weigh classes by their ratios, also where one has none."""
    mean = torch.randn(6, 3).double()
    ratios = torch.tensor([0.0, 1.0, 2.0]).double()
    p = [
        bridge(DiagonalGaussian(mean, unit * ratios), torch.zeros(6).double())
        for unit in (1e-9, 1e-2)
    ]
    torch.testing.assert_close(p[0], p[1])
    assert p[0][:, 0].min() > 0.99  # the class that nothing is unsure about has the weight
    assert p[0][:, 1:].min() > 0  # but not all of it


@pytest.mark.parametrize("link", [probit, twice_probit, bridge])
def test_one_output_means_two_classes(link) -> None:  # type: ignore[no-untyped-def]
    mean, v = torch.linspace(-4, 4, 9)[:, None], torch.linspace(0.1, 8, 9).double()
    p = link(DiagonalGaussian(mean, torch.ones(())), v)
    assert p.shape == (9, 2)
    torch.testing.assert_close(p.sum(1), torch.ones(9))
    # Positive outputs speak for class 1, in proportion; zero for neither.
    assert torch.equal(p[:, 1] > 0.5, mean[:, 0] > 0)
    torch.testing.assert_close(p[4], torch.tensor([0.5, 0.5]))
    # Mirror images.
    torch.testing.assert_close(link(DiagonalGaussian(-mean, torch.ones(())), v), p.flip(1))
    samples = monte_carlo(mean.double() + 3 * torch.randn(20_000, 9, 1).double())
    assert samples.shape == (9, 2)
    assert torch.equal(samples[:4, 1] < 0.5, torch.ones(4, dtype=torch.bool))


@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from([0.01, 1.0, 30.0]))
def test_all_links_give_distributions_and_are_exact_together_for_equal_means(
    classes: int, seed: int, spread: float
) -> None:
    gaussian = random_gaussian(classes, seed, spread)
    v = torch.rand(6).double()
    links = (probit, twice_probit, bridge)
    for p in (*(link(gaussian, v) for link in links), monte_carlo(gaussian.sample(10))):
        assert (p >= 0).all()
        torch.testing.assert_close(p.sum(1), torch.ones(6).double())
    flat = DiagonalGaussian(torch.zeros(6, classes).double(), torch.full((), spread).double())
    for p in (link(flat, v) for link in links):
        torch.testing.assert_close(p, torch.full((6, classes), 1 / classes).double())


def test_probit_and_monte_carlo_agree_for_two_classes() -> None:
    """For one output the probit is known to be within 0.02 of the integral."""
    mean = torch.linspace(-3, 3, 7)[:, None].double()
    gaussian = DiagonalGaussian(mean, torch.tensor(4.0))
    sampled = monte_carlo(gaussian.sample(200_000, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(probit(gaussian, torch.zeros(7)), sampled, atol=0.02, rtol=0)
