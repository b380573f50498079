"""The operations against float64 references; Triton's interpreter runs the kernels on a CPU."""

from __future__ import annotations

import copy
import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from devices import USES_GPU
from networks import blobs, far_from_zero, laplace_over_blobs, mlp
from references import nearest_distance
from rgpr._backend import arithmetic as fused
from rgpr._backend.small_layers import Packed, Parts, originals_of
from rgpr.posteriors import LastLayerLaplace
from rgpr.posteriors.gaussian import Gaussian
from rgpr.residual.collecting import Collector
from rgpr.residual.prototypes import Prototypes
from rgpr.residual.recipes import Strategy
from rgpr.saving.export import program

pytestmark = USES_GPU

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Triton's interpreter cannot turn a float64 into a bfloat16; a GPU can.
ANSWERS = [t for t in DTYPES if torch.cuda.is_available() or t != torch.bfloat16]


@pytest.fixture(scope="module", params=["torch", "triton"])
def operations(request: pytest.FixtureRequest) -> Any:
    """The references in plain torch, then the Triton kernels, by the names of the operations."""
    if request.param == "torch":
        return fused
    pytest.importorskip("triton", reason="no Triton on this platform")
    cuda = importlib.import_module("rgpr._backend.cuda")
    assert cuda.works(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return SimpleNamespace(**fused.FASTER["cuda"])


@pytest.fixture(autouse=True)
def _device(operations: Any) -> Iterator[None]:
    """Run Triton's kernels on a GPU if there is one, else by its interpreter; see conftest."""
    gpu = operations is not fused and torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"), pytest.MonkeyPatch.context() as patch:
        if operations is not fused and not gpu:
            as_tensor_cores(patch)
        yield


def as_tensor_cores(patch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter multiply as TF32 where a kernel asks for it.

    It would multiply in float32 whatever the kernel asks for.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def read(handle: Any) -> Any:
        return TensorHandle((handle.data.view("int32") & -0x2000).view("float32"), handle.dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if "tf32" in str(precision).lower():
            a, b = read(a), read(b)
        return plain(self, a, b, d, precision, *rest)

    plain = InterpreterBuilder.create_dot
    patch.setattr(InterpreterBuilder, "create_dot", dot)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def laid_out(h: Tensor, layout: str) -> Tensor:
    """Return the same values in another order of memory."""
    if layout == "channels last" and h.dim() == 4:
        return h.contiguous(memory_format=torch.channels_last)
    return h.transpose(0, -1).contiguous().transpose(0, -1) if layout == "strided" else h


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
layouts = st.sampled_from(["contiguous", "channels last", "strided"])
seeds = st.integers(0, 10**6)


@settings(max_examples=60)
@given(seeds, st.integers(0, 5), shapes, layouts, st.sampled_from(DTYPES), st.booleans())
def test_mean_cubes(
    operations: Any,
    seed: int,
    rows: int,
    shape: list[int],
    layout: str,
    dtype: torch.dtype,
    starts: bool,
) -> None:
    h = laid_out((3 * drawn(seed, rows, *shape)).to(dtype), layout)
    n = h[:1].numel() if rows else torch.Size(shape).numel()
    compute = torch.promote_types(dtype, torch.float32)
    mean, scale = drawn(seed + 1, n).to(compute), drawn(seed + 2, n).to(compute).abs() + 0.5
    offset = drawn(seed + 3, n).to(compute).abs() if starts else None
    ours = operations.mean_cubes(h, mean, scale, offset)
    z = ((h.double().flatten(1) - mean) / scale).abs()
    reference = (z - (0 if offset is None else offset)).clamp_min(0).pow(3).mean(1) / 3
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-9)


def distance_cubes(z: Tensor, centers: Tensor, offset: Tensor | None) -> Tensor:
    """Return what `nearest_cubes` promises, by distances between all pairs of points in float64."""
    mode = "donot_use_mm_for_euclid_dist"  # Differences of large products would lose digits.
    pairs = torch.cdist(z.double(), centers.double(), compute_mode=mode)
    distance = pairs.amin(1) / centers.shape[1] ** 0.5
    return (distance - (0 if offset is None else offset.double())).clamp_min(0).pow(3) / 3


@settings(max_examples=40)
@given(seeds, st.integers(0, 4), st.integers(1, 20), st.integers(1, 12), st.booleans())
def test_nearest_cubes(operations: Any, seed: int, rows: int, n: int, k: int, starts: bool) -> None:
    h, centers = 10 * drawn(seed, rows, n).double(), 10 * drawn(seed + 1, k, n).double()
    offset = drawn(seed + 2, 1).double().abs() if starts else None
    divided, peak = operations.peak_out(h)
    torch.testing.assert_close(divided * peak, h)
    assert bool((divided.abs() <= 1).all())
    products = torch.cat([divided, divided @ centers.T], 1)
    halves = centers.square().sum(1) / 2
    ours = operations.nearest_cubes(products, centers, halves, peak, offset)
    assert ours.dtype == torch.float64
    expected = distance_cubes(h, centers, offset)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def packed(prototypes: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> Packed:
    """Pack layers, each given by its origin, its axes, its centers along them and its offset."""
    parts = {}
    for index, (origin, axes, centers, offset) in enumerate(prototypes):
        onto = torch.cat([axes, axes @ centers.T], 1)
        parts[index] = Parts(origin, onto, centers, centers.square().sum(1) / 2, offset)
        assert parts[index].fit
    return Packed(parts)


@settings(max_examples=25)
@given(
    seeds,
    st.integers(0, 90),
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 64), st.booleans()), min_size=1, max_size=3
    ),
)
def test_packed_cubes(
    operations: Any, seed: int, rows: int, layers: list[tuple[int, int, bool]]
) -> None:
    hs, prototypes, expected = [], [], []
    for number, (n, k, starts) in enumerate(layers):
        at = seed + 10 * number
        h, axes, centers = drawn(at, rows, n), drawn(at + 1, n, n), 3 * drawn(at + 2, k, n)
        origin = 10 * drawn(at + 4, n)
        h = 10 * h + origin
        offset = drawn(at + 3, 1).abs() if starts else None
        hs.append(h)
        prototypes.append((origin, axes, centers, offset))
        z = (h.double() - origin.double()) @ axes.double()
        expected.append(distance_cubes(z, centers, offset))
    ours = packed(prototypes)
    found = operations.packed_cubes([hs[index] for index in ours.layers], ours)
    assert found.shape == (rows, len(layers))
    for index, column in zip(ours.layers, found.unbind(1), strict=True):
        torch.testing.assert_close(column, expected[index], rtol=1e-5, atol=1e-9)


@settings(max_examples=25)
@given(seeds, st.integers(60, 150), st.integers(1, 150), st.integers(1, 150), st.integers(1, 64))
def test_weighted_squares(
    operations: Any, seed: int, rows: int, n: int, m: int, outputs: int
) -> None:
    h, matrix, weights = (
        drawn(seed, rows, n).clamp(-1, 1),
        drawn(seed + 1, n, m),
        drawn(seed + 2, m, outputs).abs(),
    )
    found = operations.weighted_squares(h, matrix, weights if seed % 2 else weights.T.clone().T)
    if operations is fused or rows < 64:
        assert found is None  # Callers make both products.
        return
    assert found.dtype == torch.float64
    expected = (h.double() @ matrix.double()).square() @ weights.double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * (1 + n**2))
    torch.testing.assert_close(found.sum(), expected.sum(), rtol=1e-5, atol=1e-5)


def test_weighted_squares_that_are_not_finite_stay_in_their_rows(operations: Any) -> None:
    h = torch.ones(70, 40)
    h[0, 1], h[1, 0] = torch.nan, torch.inf
    found = operations.weighted_squares(h, torch.eye(40), torch.ones(40, 2))
    if found is not None:
        assert found[0].isnan().all()
        assert not found[1].isfinite().any()
        torch.testing.assert_close(found[2:], torch.full((68, 2), 40.0, dtype=torch.float64))


def test_wide_rows_and_many_outputs_have_products_of_their_own(operations: Any) -> None:
    h, matrix = drawn(0, 70, 8), drawn(1, 8, 8)
    assert operations.weighted_squares(h, matrix, drawn(2, 8, 65).abs()) is None
    assert operations.weighted_squares(h.double(), matrix.double(), torch.ones(8, 2)) is None
    many = drawn(3, 1025, 8)
    assert operations.weighted_squares(many, matrix, drawn(2, 8, 2).abs()) is None


def test_packed_values_that_are_not_finite_or_huge_stay_in_their_rows(by_kernels: None) -> None:
    h = torch.ones(5, 3)
    h[1, 0], h[2, 1], h[3, 0], h[3, 2], h[4] = torch.inf, torch.nan, torch.inf, torch.nan, 1e38
    eye, centers = torch.eye(3), torch.zeros(2, 3)
    ours = packed([(torch.zeros(3), eye, centers, None)]).unit_variances({0: h})[0]
    assert ours[:2].tolist() == pytest.approx([1 / 3, torch.inf], rel=1e-14)
    assert ours[2:4].isnan().all()
    assert ours[4].item() == pytest.approx(1e114 / 3, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_activations_far_from_zero_keep_their_digits(by_kernels: None, seed: int) -> None:
    """Both kernels agree with float64, and a row alone agrees with the row in a batch."""
    h, y = (t.to(torch.get_default_device()) for t in far_from_zero(seed))
    collector = Collector(Strategy("prototypes", "pooled"))
    collector.update(h, y, int(y.max()) + 1)
    coordinates = collector.finish()
    assert isinstance(coordinates, Prototypes)
    packed = Packed({0: coordinates.parts})

    def together(rows: Tensor) -> Tensor:
        return packed.unit_variances({0: rows})[0]

    def apart(rows: Tensor) -> Tensor:  # This is how layers are measured that are not packed.
        return coordinates._safely(rows - coordinates.origin)

    expected = nearest_distance(h, h, y).pow(3) / 3
    for unit_variance in (together, apart):
        u = unit_variance(h)
        torch.testing.assert_close(u, expected, rtol=1e-4, atol=0)
        some = range(0, len(h), 20)
        alone = torch.cat([unit_variance(h[i : i + 1]) for i in some])
        torch.testing.assert_close(alone, u[::20], rtol=1e-6, atol=0)


class Shift(nn.Module):
    """Moves its input far from zero, each row by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1000


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_row_alone_is_the_row_in_a_batch(by_kernels: None) -> None:
    """This holds for activations far from zero too.

    The logits hardly depend on them here, but the variance does.
    """
    torch.manual_seed(0)
    device = torch.get_default_device()
    head = nn.Linear(48, 3)
    head.weight.mul_(1e-4)
    head.bias.copy_(torch.tensor([2.0, 0.0, -2.0]))
    x, y = far_from_zero(0)
    x, y = (x - 1000).to(device), y.to(device) % 3
    model = rgpr.RGPR(nn.Sequential(Shift(), head).to(device), layers=["0"])
    model.fit([(x, y)], progress=False)
    x = 3 * x[:20]
    expected, plain = model(x), torch.softmax(model.posterior.network(x), 1)
    assert ((expected - plain).abs().amax(1) > 1e-2).all()  # All rows have a variance.
    model.compile(backend="aot_eager")
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=0)
    for i in range(len(x)):
        torch.testing.assert_close(model(x[i : i + 1]), expected[i : i + 1], rtol=1e-6, atol=0)


@settings(max_examples=40)
@given(seeds, st.lists(st.integers(0, 40), min_size=1, max_size=3), shapes, layouts)
def test_add_moments(
    operations: Any, seed: int, sizes: list[int], shape: list[int], layout: str
) -> None:
    n = torch.Size(shape).numel()
    near, total, squares = drawn(seed, n), torch.zeros(n).double(), torch.zeros(n).double()
    expected = torch.zeros(2, n).double()
    for number, size in enumerate(sizes):
        h = laid_out(drawn(seed + number + 1, size, *shape), layout)
        operations.add_moments(h, near, total, squares)
        deviation = h.double().flatten(1) - near
        expected += torch.stack([deviation.sum(0), deviation.square().sum(0)])
    torch.testing.assert_close(torch.stack([total, squares]), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(
    seeds,
    st.integers(0, 4),
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    layouts,
    st.sampled_from(DTYPES),
)
def test_pooled(
    operations: Any, seed: int, rows: int, shape: list[int], layout: str, dtype: torch.dtype
) -> None:
    h = laid_out(drawn(seed, rows, *shape).to(dtype), layout)
    expected = h.double().flatten(2).mean(2)
    ours = operations.pooled(h)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 40, 50), (1, 300, 5, 7), (2, 9, 200), (2, 150, 20)])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_pooled_over_more_than_a_tile(operations: Any, shape: tuple[int, ...], layout: str) -> None:
    h = laid_out(drawn(0, *shape), layout)
    expected = h.double().flatten(2).mean(2)
    torch.testing.assert_close(operations.pooled(h).double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_and_parameters_wider_than_a_block(operations: Any) -> None:
    h, mean, scale = drawn(0, 2, 3000), drawn(1, 3000), drawn(2, 3000).abs() + 1
    reference = ((h.double() - mean) / scale).abs().pow(3).mean(1) / 3
    ours = operations.mean_cubes(h, mean, scale, None)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=0)
    centers = 5 * drawn(3, 1500, 3)
    rows, peak = operations.peak_out(5 * drawn(4, 4, 3))
    products = torch.cat([rows, rows @ centers.T], 1)
    halves = centers.square().sum(1) / 2
    ours = operations.nearest_cubes(products, centers, halves, peak, None)
    reference = distance_cubes(rows * peak, centers, None)
    torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-6)
    wide, wide_peak = operations.peak_out(h)
    torch.testing.assert_close(wide * wide_peak, h)


def test_values_that_are_not_finite_stay_in_their_rows(operations: Any) -> None:
    h = torch.ones(4, 3)
    h[1, 0], h[2, 1], h[3, 0], h[3, 2] = torch.inf, torch.nan, torch.inf, torch.nan
    zero, one = torch.zeros(3), torch.ones(3)
    ours = operations.mean_cubes(h, zero, one, one / 2)
    assert ours[:2].tolist() == [0.125 / 3, torch.inf]
    assert ours[2:].isnan().all()
    rows, peak = operations.peak_out(h)
    products = torch.cat([rows, rows @ torch.zeros(3, 2)], 1)
    ours = operations.nearest_cubes(products, torch.zeros(2, 3), torch.zeros(2), peak, None)
    assert ours[:2].tolist() == pytest.approx([1 / 3, torch.inf], rel=1e-14)
    assert ours[2:].isnan().all()


def test_the_largest_values_do_not_overflow(operations: Any) -> None:
    h = torch.full((1, 2), 1e38)
    ours = operations.mean_cubes(h, torch.zeros(2), torch.ones(2), None)
    assert ours.item() == pytest.approx(1e114 / 3, rel=1e-5)
    rows, peak = operations.peak_out(h)
    products = torch.cat([rows, rows @ torch.ones(2, 1)], 1)
    ours = operations.nearest_cubes(products, torch.ones(1, 2), torch.ones(1), peak, None)
    assert ours.item() == pytest.approx(1e114 / 3, rel=1e-5)


def test_an_offset_at_the_training_maximum_leaves_exactly_zero(operations: Any) -> None:
    """A kernel must round a division as torch did when the offset was found."""
    h, mean, scale = 7 * drawn(0, 40, 50), drawn(1, 50), drawn(2, 50).abs() + 0.1
    offset = ((h - mean) / scale).abs().amax(0)
    assert not operations.mean_cubes(h, mean, scale, offset).any()


@settings(max_examples=40)
@given(
    seeds,
    st.integers(0, 4),
    st.integers(2, 9),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(ANSWERS),
)
def test_probit(
    operations: Any,
    seed: int,
    rows: int,
    classes: int,
    layers: int,
    sets_in: bool,
    dtype: torch.dtype,
) -> None:
    """The kernel agrees with the formulas, for the sum of the paper and for an onset."""
    if operations is fused:
        pytest.skip("in plain torch the model composes the probabilities")
    mean, variance = (3 * drawn(seed, rows, classes)).to(dtype), drawn(seed + 1, rows, classes)
    variance, u = variance.double().exp(), (3 * drawn(seed + 2, rows, layers)).double().exp()
    sigma2, temperature = drawn(seed + 3, layers).double().exp(), torch.tensor(1.7).double()
    sigma2 = torch.where(drawn(seed + 4, layers) > 1, 0.0, sigma2)  # Some are switched off.
    typical = drawn(seed + 5, layers).double().clamp_min(0)  # Some never varied.
    counted = ((sigma2 > 0) & (typical > 0)).double()
    counted[0] = 0.0 if bool(counted[1:].any()) else 1.0
    exponents, share = counted / counted.sum(), 2.0**-10
    onset = torch.tensor(1.5).double() if sets_in else None
    slope = torch.tensor(0.7).double()
    scales = fused.ProbitScales(sigma2, onset, slope, typical, share, temperature, far=1e12)
    ours = operations.fused_probit(mean, variance, u, scales)
    parts = sigma2 * u
    if onset is None:
        spread = 1 + math.pi / 8 * (variance + parts.sum(1, keepdim=True))
    else:
        joint = parts.pow(exponents).prod(1) + share * parts.mean(1)
        beyond = slope * (joint - onset).clamp_min(0)
        spread = (1 + math.pi / 8 * variance) * (1 + beyond[:, None])
    expected = torch.softmax(mean.double() / spread.sqrt() / temperature, 1)
    assert ours.dtype == dtype
    rounding = 1e-9 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=rounding, atol=rounding / 100)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_an_infinite_layer_beside_a_silent_one(operations: Any) -> None:
    """The variance is infinite and no NaN, so the answer is the uniform distribution."""
    if operations is fused:
        pytest.skip("in plain torch the residual does this, which has its own test")
    one = torch.tensor(1.0).double()
    scales = fused.ProbitScales(
        one.expand(3).clone(), one, one, one.expand(3).clone(), 1e-3, one, 1e12
    )
    u = torch.tensor([[1.0, torch.inf, 0.0], [1e3, 0.0, torch.inf]]).double()
    mean = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    ours = operations.fused_probit(mean, torch.zeros(2, 2).double(), u, scales)
    assert ours.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.fixture
def by_kernels(operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whole models use the kernels, also on a CPU, where Triton's interpreter runs them."""
    if operations is fused:
        pytest.skip("compares kernels with torch")
    if not torch.cuda.is_available():
        for table in (fused.FASTER, fused._IN_GRAPHS):
            monkeypatch.setitem(table, "cpu", table["cuda"])


@contextmanager
def plain_torch() -> Iterator[None]:
    """Take all kernels away, whatever a test has registered."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cpu", "cuda"):
            patch.setitem(fused.FASTER, kind, {})
        yield


def over_laplace(residual: str) -> rgpr.RGPR:
    """Return a model over last-layer Laplace that was fitted and calibrated."""
    with torch.enable_grad():
        la, x, _ = laplace_over_blobs("classification", "kron")
    model = rgpr.RGPR(la, residual=residual).fit([x], progress=False)
    others = x + 0.1 * torch.randn_like(x)
    with torch.no_grad():
        # The labels are the predictions, because with wrong ones no variance would be too large.
        right = model.posterior.network(others).argmax(1)
    model.calibrate([(others, right)], progress=False)
    assert (model.sigma2 > 0).all()
    return model


def onset_over_laplace() -> rgpr.RGPR:
    return over_laplace("onset")


def paper_over_laplace() -> rgpr.RGPR:
    return over_laplace("paper")


def images() -> rgpr.RGPR:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )
    x = torch.randn(30, 1, 6, 6)
    with torch.device("cpu"), plain_torch():
        return rgpr.RGPR(network.cpu()).fit([(x.cpu(), torch.arange(30) % 3)], progress=False)


MODELS = {
    "network": lambda: rgpr.RGPR(mlp()).fit([blobs()]),
    "the paper's": lambda: rgpr.RGPR(mlp(), residual="paper").fit([blobs()]),
    "input alone": lambda: rgpr.RGPR(mlp(), layers="input").fit([blobs()]),
    "onset over Laplace": onset_over_laplace,
    "the paper's over Laplace": paper_over_laplace,
}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_whole_predictions(build, by_kernels: None, operations: Any) -> None:  # type: ignore[no-untyped-def]
    with torch.device("cpu"), plain_torch():
        model, (x, _) = build(), blobs()
        model.temperature = 1.7
        rows = [alpha * x[:4] for alpha in (1, 3, 100, 1e6, 1e13, 1e30, 1e38)]
        strange = x[:4].clone()
        strange[0, 1], strange[1, 0] = torch.inf, torch.nan
        strange[2, 0], strange[2, 1] = -torch.inf, torch.nan
        rows = torch.cat([*rows, strange])
    model.to(torch.get_default_device())
    with plain_torch():
        expected = model(rows.to(torch.get_default_device()))
    ours = model(rows.to(torch.get_default_device()))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert ours[-3:-1].isnan().all()
    assert ours[-4].tolist() == pytest.approx([1 / 3] * 3)


@torch.no_grad()
def test_layers_that_wait_are_read_before_they_change(by_kernels: None) -> None:
    """An activation in place overwrites the output of the layer before it."""
    torch.manual_seed(0)
    device = torch.get_default_device()
    layers = [nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    network, (x, y) = nn.Sequential(*layers, nn.Linear(8, 3)), blobs()
    model = rgpr.RGPR(network, layers=["0", "2"]).fit([(x, y)], progress=False).to(device)
    far = 5 * x.to(device)
    with plain_torch():
        expected = model.variance(far)
    assert (expected > 0).any()
    torch.testing.assert_close(model.variance(far), expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_what_was_packed_follows_the_model(by_kernels: None) -> None:
    device = torch.get_default_device()
    x, y = (t.to(device) for t in blobs())
    network = mlp().to(device)
    first = rgpr.RGPR(network).fit([(x, y)], progress=False)
    second = rgpr.RGPR(network).fit([(2 * x + 1, y)], progress=False)
    far = 5 * x  # There these inputs have a variance.
    assert (first.variance(far) > 0).all()
    assert not torch.allclose(first.variance(far), second.variance(far))
    kept = first.residual._packed
    first.variance(far)
    assert kept is not None
    assert first.residual._packed is kept
    first.load_state_dict(second.state_dict())
    torch.testing.assert_close(first.variance(far), second.variance(far))
    kept = first.residual._packed
    again = copy.deepcopy(first)
    assert again.residual._packed is None
    torch.testing.assert_close(again.variance(far), second.variance(far))
    before = again.variance(far)
    again.residual.at(1).centers.add_(3)
    assert not torch.allclose(again.variance(far), before)
    again.to(device)
    assert again.residual._packed is None
    assert first.residual.pack() is kept


def test_copies_are_of_one_layer_and_not_of_another() -> None:
    centers = torch.zeros(2, 3)
    part = Parts(torch.zeros(3), torch.ones(3, 5), centers, centers.sum(1), None)
    ours = Packed({1: part})
    assert ours.is_of(originals_of({1: part}))
    assert not ours.is_of(originals_of({2: part}))
    assert not ours.is_of(originals_of({1: part._replace(offset=torch.ones(1))}))
    assert not ours.is_of(originals_of({1: part._replace(origin=torch.zeros(3))}))
    assert not ours.is_of(originals_of({1: part._replace(centers=centers.clone())}))
    centers.add_(1)
    assert not ours.is_of(originals_of({1: part}))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(MODELS["network"], marks=pytest.mark.slow),
        onset_over_laplace,
        pytest.param(paper_over_laplace, marks=pytest.mark.slow),
        images,
    ],
)
@torch.no_grad()
def test_compiled_predictions(build, by_kernels: None) -> None:  # type: ignore[no-untyped-def]
    """The graph calls the kernels as operators."""
    device = torch.get_default_device()
    model = build().to(device)
    x = torch.randn(7, *model._input_shape)
    expected = model(x)
    model.compile(backend="aot_eager")
    for size in (7, 3, 1):
        torch.testing.assert_close(model(x[:size]), expected[:size])
    called = {
        node.target
        for graph in model._compiled_call_impl._made.by_key.values()
        for node in graph.graph.nodes
    }
    assert (torch.ops.rgpr.packed_cubes.default in called) == (build is not paper_over_laplace)
    assert (torch.ops.rgpr.pooled.default in called) == (x.dim() == 4)


@pytest.mark.slow
def test_compiled_predictions_of_a_model_that_changes(by_kernels: None) -> None:
    """There are graphs with and without gradients, for few rows and for many."""
    model = images()
    model.to(torch.get_default_device())
    x = torch.randn(1100, *model._input_shape)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")

    def same(rows: int) -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x[:rows]), model(x[:rows]))

    same(7)
    torch.testing.assert_close(compiled(x[:7]), model(x[:7]))  # Parameters have gradients here.
    same(1100)
    same(1030)
    kinds = list(compiled._compiled_call_impl._made.by_key)
    assert kinds == [(False, True, 7), (True, True, 7), (False, False, 1100), (False, False, None)]
    for changed in (model, compiled):
        changed.residual.at(1).centers.add_(1)
    same(7)
    made = compiled._compiled_call_impl._made
    assert len(made.by_key) == 1
    compiled.to(torch.get_default_device())  # The model is there already.
    same(7)
    assert compiled._compiled_call_impl._made is made
    for changed in (model, compiled):
        changed.fit([(3 * x[:50], torch.arange(50) % 3)], progress=False)
    same(7)
    same(3)
    seen = []
    compiled.posterior.network[0].register_forward_hook(lambda *_: seen.append(1))
    same(2)
    same(7)
    assert len(seen) == 2


@torch.no_grad()
def test_a_network_uses_a_tensor_before_a_kernel_reads_it(by_kernels: None) -> None:
    """A compiler lays a tensor out in memory for its first use."""
    device = torch.get_default_device()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = images().to(device)
    x = torch.randn(7, *model._input_shape)
    expected = model(x)
    torch._dynamo.reset()
    model.compile(backend=backend)
    torch.testing.assert_close(model(x), expected)
    order = list(graphs[0].graph.nodes)
    reads = [node for node in order if "rgpr.pooled" in str(node.target)]
    uses = [[user for user in node.args[0].users if user is not node] for node in reads]
    assert any(uses)
    for node, others in zip(reads, uses, strict=True):
        assert not others or min(map(order.index, others)) < order.index(node)


@torch.no_grad()
def test_a_kernel_reads_a_tensor_before_a_network_overwrites_it(by_kernels: None) -> None:
    device = torch.get_default_device()
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 9, 3)]
    torch.manual_seed(0)
    with torch.device("cpu"):
        network, x = nn.Sequential(*layers), torch.randn(60, 1, 5, 5)
    model = rgpr.RGPR(network, layers=["0"]).fit([(x, torch.arange(60, device="cpu") % 3)])
    model.to(device)
    far = 3 * x[:9].to(device)
    expected = model(far)
    torch._dynamo.reset()
    model.compile(backend="eager")
    torch.testing.assert_close(model(far), expected)


def linear_probe() -> LastLayerLaplace:
    """Return a last-layer Laplace whose features are the input itself."""
    basis = torch.linalg.qr(drawn(0, 4, 4)).Q
    tensors = {"in_basis": basis, "out_basis": torch.eye(3), "spectrum": drawn(1, 4, 3).exp()}
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    device = torch.get_default_device()
    return LastLayerLaplace(network, "1", "kron", tensors, "classification").to(device)


def moments(gaussian: Gaussian) -> list[Tensor]:
    return [gaussian.variance, gaussian.covariance, gaussian.row_sums]


@torch.no_grad()
def test_last_layer_laplace(by_kernels: None) -> None:
    def same(posterior: LastLayerLaplace, x: Tensor) -> None:
        with plain_torch():
            expected = moments(posterior(x))
        for ours, theirs in zip(moments(posterior(x)), expected, strict=True):
            assert theirs.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)

    posterior, x = linear_probe(), drawn(2, 70, 4)
    same(posterior, x[:7])
    same(posterior, 1e30 * x[:7])
    same(posterior, x)
    same(posterior, 1e30 * x)
    posterior.in_basis.copy_(posterior.in_basis.flip(1))
    same(posterior, x)
    state = posterior.state_dict() | {"spectrum": drawn(3, 3, 4).exp().T}
    posterior.load_state_dict(state, assign=True)  # The spectrum has another order of memory.
    same(posterior, x)
    same(copy.deepcopy(posterior).double(), 1e45 * x.double())


@pytest.mark.parametrize("kernels", [False, True])
@torch.no_grad()
def test_a_gaussian_outlives_its_input(by_kernels: None, kernels: bool) -> None:
    with nullcontext() if kernels else plain_torch():
        posterior, x = linear_probe(), drawn(2, 7, 4)
        expected = moments(posterior(x.clone()))
        gaussian = posterior(x)
        x.fill_(100)
        for ours, theirs in zip(moments(gaussian), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_looking_at_a_variance_leaves_its_gradients(by_kernels: None) -> None:
    gaussian = linear_probe()(drawn(2, 7, 4).requires_grad_())
    with torch.no_grad():
        assert gaussian.variance.isfinite().all()
    assert gaussian.covariance.requires_grad


@torch.no_grad()
def test_exported_programs_hold_no_copies(by_kernels: None) -> None:
    model = onset_over_laplace()
    x = torch.randn(7, *model._input_shape, device="cpu")
    device = torch.get_default_device()
    model.to(device)(x.to(device))
    assert model.residual._packed is not None
    with plain_torch():
        exported = program(model, x.to(device), dynamic=True)
    held = {name.removeprefix("model.") for name in (*exported.state_dict, *exported.constants)}
    buffers = model.named_buffers(remove_duplicate=False)  # One tensor may have two names.
    assert held <= {*dict(model.named_parameters()), *dict(buffers)}
    own = {"in_basis", "out_basis", "spectrum", "bias_root", "marginal", "marginal_bias"}
    assert dict(model.posterior.named_buffers(recurse=False)).keys() == own


@torch.no_grad()
def test_fitting(by_kernels: None) -> None:
    device = torch.get_default_device()
    x, y = (t.to(device) for t in blobs())
    network = mlp().to(device)
    ours = rgpr.RGPR(network).fit([(x[:30], y[:30]), (x[30:], y[30:])])
    with plain_torch():
        expected = rgpr.RGPR(network).fit([(x[:30], y[:30]), (x[30:], y[30:])])
    assert (expected.variance(5 * x) > 0).all()
    torch.testing.assert_close(ours.variance(5 * x), expected.variance(5 * x), rtol=1e-4, atol=0)


def test_a_broken_network_shows_its_nan(by_kernels: None) -> None:
    model = rgpr.RGPR(mlp()).fit([blobs()[0]])
    with torch.no_grad():
        model.posterior.network[-1].bias[0] = torch.nan
        assert model(blobs()[0][:2]).isnan().all()


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(operations: Any, capability: int) -> None:
    """Triton compiles all kernels down to machine code, which needs no GPU."""
    if operations is fused:
        pytest.skip("nothing to compile")
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script, str(capability)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled") == 66


@pytest.mark.parametrize("layers", ["input", "auto"])
def test_gradients_are_torchs(by_kernels: None, layers: str) -> None:
    """Plain torch computes gradients, also where the logits alone have some."""
    device = torch.get_default_device()
    x = blobs()[0].to(device)
    model = rgpr.RGPR(mlp().to(device), layers=layers).fit([x])
    x = 5 * x[:5]  # There most of these inputs have a variance.
    model.posterior.network[:-1].requires_grad_(False)
    with plain_torch():
        model(x).amax(1).sum().backward()
        expected = model.posterior.network[-1].weight.grad.clone()
        v, slope = torch.func.jvp(model.variance, (x,), (torch.ones_like(x),))
        assert (v > 0).any()
        assert (slope[v > 0] != 0).all()
    model.zero_grad()
    model(x).amax(1).sum().backward()
    torch.testing.assert_close(model.posterior.network[-1].weight.grad, expected)
    torch.testing.assert_close(
        torch.func.jvp(model.variance, (x,), (torch.ones_like(x),))[1], slope
    )


def test_rows_that_do_not_fit_are_refused(operations: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"shape|fit|size"):
        operations.mean_cubes(drawn(0, 4, 10), torch.zeros(7), torch.ones(7), None)


def test_float64_rows_keep_their_digits(operations: Any) -> None:
    h = torch.tensor([[1 + 1e-9, 1.0]], dtype=torch.float64)
    ours = operations.mean_cubes(h, torch.ones(2), torch.full((2,), 1e-9), None)
    assert ours.item() == pytest.approx(1 / 6, rel=1e-5)
