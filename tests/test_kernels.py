from __future__ import annotations

import math
import resource
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references import cubic_spline_polynomial, dscs_sum
from rgpr.kernels import cubic_spline, dscs, dscs_diag, dscs_gram, relu_features

reals = st.floats(-1e3, 1e3, allow_subnormal=False)
offsets = st.sampled_from([0.0, 0.5, 2.0])
seeds = st.integers(0, 2**31)


def points(seed: int, n: int, dims: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, dims, generator=generator, dtype=torch.float64)


@given(reals, reals, st.floats(-100, 100))
def test_cubic_spline_is_the_papers_polynomial(x: float, y: float, c: float) -> None:
    ours = cubic_spline(*torch.tensor([x, y], dtype=torch.float64), c_min=c)
    assert float(ours) == pytest.approx(cubic_spline_polynomial(x, y, c), rel=1e-9, abs=1e-9)


@given(seeds, st.integers(1, 7), offsets)
def test_dscs_is_the_sum_of_both_sides(seed: int, dims: int, offset: float) -> None:
    x, y = points(seed, 2, dims, 3.0)
    expected = dscs_sum(x, y, offset)
    assert float(dscs(x, y, offset=offset)) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert float(dscs(x, y, offset=offset, variance=2.5)) == pytest.approx(
        2.5 * expected, rel=1e-12, abs=1e-13
    )


@given(seeds, st.integers(1, 5), offsets)
def test_symmetric_and_positive_semidefinite(seed: int, dims: int, offset: float) -> None:
    X = points(seed, 25, dims, 2.0)
    K = dscs_gram(X, offset=offset)
    assert torch.equal(K, K.T)
    eigenvalues = torch.linalg.eigvalsh(K)
    assert eigenvalues.min() >= -1e-12 * max(float(eigenvalues.max()), 1e-300)


@given(seeds, st.integers(1, 5), st.floats(0.01, 0.99), st.floats(0.1, 10))
def test_scaling_lemma_corrected(seed: int, dims: int, delta: float, variance: float) -> None:
    """k <= variance * delta^3 / 3 when every |x_i| <= delta."""
    x, y = delta * points(seed, 2, dims).tanh()
    assert 0 <= float(dscs(x, y, variance=variance)) <= variance * delta**3 / 3 * (1 + 1e-12)


def test_scaling_lemma_as_printed_is_false() -> None:
    """||x||^2 <= delta allows |x_1| = sqrt(delta), so k is of order delta^1.5, not delta^3."""
    deltas = torch.tensor([1e-2, 1e-4], dtype=torch.float64)
    k = torch.stack([dscs_diag(delta.sqrt()[None]) for delta in deltas])
    slope = (k[0] / k[1]).log() / (deltas[0] / deltas[1]).log()
    assert float(slope) == pytest.approx(1.5)


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_relu_features_converge_at_rate_one_over_k(x: float, y: float) -> None:
    """k times the error stays bounded, and by the same constant for all k."""
    tx, ty = torch.tensor([x, y], dtype=torch.float64)
    exact = float(dscs(tx[None], ty[None]))
    for k in (6, 20, 60, 200, 2000):
        finite = float(relu_features(tx, k, c_max=1.0) @ relu_features(ty, k, c_max=1.0))
        assert abs(finite - exact) * k <= 2.0


def test_rate_is_no_better_than_one_over_k() -> None:
    x = torch.tensor(0.7, dtype=torch.float64)
    ks = torch.tensor([2.0**i for i in range(5, 14)], dtype=torch.float64)
    errors = torch.stack(
        [
            (relu_features(x, int(k), c_max=1.0).square().sum() - dscs_diag(x[None])).abs()
            for k in ks
        ]
    )
    slope = (errors[-1] / errors[0]).log() / (ks[-1] / ks[0]).log()
    assert float(slope) == pytest.approx(-1, abs=0.05)


def test_relu_features_shape_and_sides() -> None:
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    features = relu_features(x, 6, c_max=2.0)
    assert features.shape == (3, 4, 6)
    assert torch.equal(features[..., :3] > 0, x[..., None] > torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(features, relu_features(-x, 6, c_max=2.0).roll(3, dims=-1))


def test_two_features_are_the_two_sides() -> None:
    x = torch.tensor([-3.0, 0.5])
    expected = torch.tensor([[0.0, 3.0], [0.5, 0.0]])
    torch.testing.assert_close(relu_features(x, 2, c_max=4.0), math.sqrt(4.0) * expected)


def test_features_have_the_digits_of_their_dtype() -> None:
    x, k, c_max = 0.77, 20, 1.3
    starts = [c_max * i / 9 for i in range(10)]
    expected = [math.sqrt(c_max / 10) * max(0.0, x - start) for start in starts]
    ours = relu_features(torch.tensor(x, dtype=torch.float64), k, c_max=c_max)
    assert ours[:10].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_no_cancellation_in_float32() -> None:
    """Where the expanded polynomial has no correct digit left, ours has all of float32's."""
    x = torch.tensor([1e4, 1e4 + 1])
    exact = cubic_spline_polynomial(float(x[1]), float(x[0]), 1e4 - 1)
    ours = cubic_spline(x[1], x[0], c_min=1e4 - 1)
    a, b, c = x[1], x[0], torch.tensor(1e4 - 1)
    expanded = (b**3 - c**3) / 3 - (b**2 - c**2) / 2 * (a + b) + (b - c) * a * b
    assert float(ours) == pytest.approx(exact, rel=1e-6)
    assert abs(float(expanded) - exact) > 0.1 * exact


def test_no_cancellation_with_an_offset() -> None:
    X = 1e3 + 10 * torch.rand(50, 3)
    exact = dscs_gram(X.double(), offset=1e3)
    torch.testing.assert_close(dscs_gram(X, offset=1e3).double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(dscs_diag(X, offset=1e3), exact.diagonal().float())


def test_infinite_inputs() -> None:
    inf = torch.tensor(torch.inf)
    assert cubic_spline(inf, torch.tensor(-1.0)) == 0
    assert cubic_spline(inf, torch.tensor(0.0)) == 0  # where the first feature starts


@given(seeds, st.integers(1, 6), offsets)
def test_diagonal(seed: int, dims: int, offset: float) -> None:
    X = points(seed, 9, dims, 3.0)
    diagonal = dscs_diag(X, variance=0.3, offset=offset)
    torch.testing.assert_close(diagonal, dscs(X, X, variance=0.3, offset=offset))
    torch.testing.assert_close(diagonal, dscs_gram(X, variance=0.3, offset=offset).diagonal())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12, 1e20, 1e30, 3e38])
def test_diagonal_has_float64s_range(scale: float) -> None:
    x = torch.tensor([[1.0, -0.5, 0.25]]) * scale
    expected = (x.double().abs() ** 3).mean(-1) / 3
    torch.testing.assert_close(dscs_diag(x, dtype=torch.float64), expected, rtol=1e-6, atol=0)


def test_diagonal_of_a_row_does_not_depend_on_other_rows() -> None:
    """A row is scaled by its own peak: by a larger one its cubes would underflow."""
    x = torch.tensor([[1e-12, 2e-12], [1.0, -2.0], [1e30, 3e30]])
    alone = torch.cat([dscs_diag(row[None], dtype=torch.float64) for row in x])
    assert (alone > 0).all()
    assert torch.equal(dscs_diag(x, dtype=torch.float64), alone)


def test_diagonal_of_special_values() -> None:
    x = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [1.0, 1.0]])
    k = dscs_diag(x)
    assert k[0] == 0
    assert k[1] == torch.inf
    assert k[2].isnan()
    assert k[3] == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = points(0, 6, 3).to(dtype)
    eps = torch.finfo(dtype).eps
    for ours, reference in (
        (dscs(x, x.flip(0)), dscs(x.double(), x.flip(0).double())),
        (dscs_diag(x), dscs_diag(x.double())),
        (dscs_gram(x), dscs_gram(x.double())),
        (cubic_spline(x, x.flip(0)), cubic_spline(x.double(), x.flip(0).double())),
        (relu_features(x, 4, c_max=1.0), relu_features(x.double(), 4, c_max=1.0)),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), reference, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_gradients(offset: float) -> None:
    x, y = points(1, 5, 3).requires_grad_(), points(2, 5, 3).requires_grad_()
    variance = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda a, b, v: dscs(a, b, variance=v, offset=offset), (x, y, variance))
    assert check(lambda a, v: dscs_diag(a, variance=v, offset=offset), (x, variance))
    assert check(lambda a, b, v: dscs_gram(a, b, variance=v, offset=offset), (x, y, variance))
    assert check(lambda a, b, v: cubic_spline(a, b, c_min=offset, variance=v), (x, y, variance))
    assert torch.autograd.gradgradcheck(lambda a: dscs_diag(a, offset=offset), (x,))


def test_broadcasting() -> None:
    x, y = points(0, 4, 3), points(1, 5, 3)
    expected = dscs_gram(x, y)
    torch.testing.assert_close(dscs(x[:, None], y[None]), expected)
    variance = torch.rand(4, 1, dtype=torch.float64)
    torch.testing.assert_close(dscs(x[:, None], y[None], variance=variance), variance * expected)
    offset = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(dscs(x[:, None], y, offset=offset), dscs_gram(x, y, offset=offset))
    assert cubic_spline(x, y[0, 0]).shape == x.shape


def test_gram_in_blocks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points(0, 17, 3).requires_grad_(), points(1, 13, 3)
    whole = dscs_gram(x, y)
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    monkeypatch.setattr("rgpr.kernels._GRAM_BLOCK", {"cpu": 20})
    blocks = dscs_gram(x, y)
    torch.testing.assert_close(blocks, whole)
    torch.testing.assert_close(torch.autograd.grad(blocks.sum(), x)[0], gradient)
    with torch.no_grad():
        torch.testing.assert_close(dscs_gram(x, y), whole)
    batched = dscs_gram(torch.stack([x, 2 * x]), y, variance=torch.tensor([1.0, 3.0]).double())
    torch.testing.assert_close(batched[1], 3 * dscs_gram(2 * x, y))
    several = dscs_gram(x, torch.stack([y, 2 * y]))
    torch.testing.assert_close(several, torch.stack([dscs_gram(x, y), dscs_gram(x, 2 * y)]))
    assert dscs_gram(x[:0], y).shape == (0, 13)
    assert dscs_gram(torch.empty(0, 4, 3), y.float()).shape == (0, 4, 13)


def test_gradients_of_a_gram_matrix_keep_no_block() -> None:
    """Blocks are computed anew when gradients are asked for, so autograd keeps the inputs alone."""
    kept: list[int] = []
    x, y = points(0, 60, 8).requires_grad_(), points(1, 50, 8)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        dscs(x[:, None], y[None])
        at_once = sum(kept)
        kept.clear()
        dscs_gram(x, y)
    assert at_once >= 60 * 50 * 8 > 4 * sum(kept)


_GRAM = """
import resource, torch
from rgpr.kernels import dscs_gram
X = torch.randn(4000, 100)
dscs_gram(X[:10])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
K = dscs_gram(X)
assert K.shape == (4000, 4000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_gram_of_4000_points_in_100_dimensions_fits() -> None:
    """The answer takes 64 MB (and briefly a few copies), an n x m x N tensor would take 6.4 GB."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    done = subprocess.run([sys.executable, "-c", _GRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 500


def test_errors_name_the_trouble() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"torch\.int64.*x\.float"):
        dscs(x.long(), x)
    with pytest.raises(TypeError, match="list"):
        dscs_diag([1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(3, 4\)"):
        dscs(x, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(3, 1\)"):
        dscs_gram(x, x[:, :1])
    for single, other in ((x[0, 0], x[0]), (x[0], x[0, 0])):
        with pytest.raises(ValueError, match="the same number of features"):
            dscs(single, other)
    with pytest.raises(ValueError, match=r"^X has shape \(2,\)"):
        dscs_gram(x[0], x)
    with pytest.raises(ValueError, match=r"^Y has shape \(2,\)"):
        dscs_gram(x, x[0])
    for kernel in (partial(dscs, x, x), partial(dscs_diag, x), partial(dscs_gram, x)):
        with pytest.raises(ValueError, match="offset = -1"):
            kernel(offset=-1)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k = {k}"):
            relu_features(x, k, c_max=1.0)
    with pytest.raises(ValueError, match="c_max = 0"):
        relu_features(x, 4, c_max=0)
