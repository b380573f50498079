from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import blobs, convolutional, far_from_zero, mlp
from references import nearest_distance
from rgpr._network.moments import ClassMoments
from rgpr.kernels import dscs, dscs_gram
from rgpr.residual.collecting import Collector
from rgpr.residual.coordinates import Coordinates, reduce
from rgpr.residual.exact import ResidualProcess
from rgpr.residual.prototypes import Prototypes
from rgpr.residual.recipes import RESIDUALS, Strategy

EVERY = [
    Strategy(kind, of, offset)
    for kind in ("moments", "whitened", "prototypes")
    for of in ("raw", "pooled", "normalised")
    for offset in (None, 0.5, 1.0)
]
IDS = [f"{s.coordinates}-{s.of}-{s.offset}" for s in EVERY]


def collected(strategy: Strategy, h: Tensor, y: Tensor, batches: int = 3) -> Coordinates:
    collector = Collector(strategy, 1.0)
    for part, labels in zip(h.chunk(batches), y.chunk(batches), strict=True):
        rows = collector.take(part)
        if collector.needs_classes:
            collector.update(rows, labels, int(y.max()) + 1)
    return collector.finish()


def beyond(coordinates: Coordinates, h: Tensor) -> Tensor:
    """Distances beyond the offsets, ``(B, N)``."""
    z = coordinates(h).abs()
    return z if coordinates.offset is None else (z - coordinates.offset).clamp_min(0)


@pytest.mark.parametrize("strategy", EVERY, ids=IDS)
def test_the_theorem_holds_for_every_strategy(strategy: Strategy) -> None:
    """Hidden coordinates may be bounded; the input's never are."""
    x, y = torch.rand(90, 2, 8, 8), torch.arange(90) % 3
    recipe = rgpr.ResidualRecipe(hidden=strategy, input=Strategy(offset=strategy.offset))
    model = rgpr.RGPR(convolutional(), residual=recipe).fit([(x[:40], y[:40]), (x[40:], y[40:])])
    far = [model.variance(alpha * x[:9]) for alpha in (1e6, 1e8)]
    slope = (far[1] / far[0]).log() / math.log(100)
    torch.testing.assert_close(slope, torch.full_like(slope, 3.0), atol=0.02, rtol=0)
    for link in ("probit", "mc", "bridge"):
        p = model(1e12 * x[:9], link_approx=link, n_samples=30)
        torch.testing.assert_close(p, torch.full_like(p, 1 / 3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("strategy", EVERY, ids=IDS)
def test_batches_do_not_matter_and_files_keep_it(strategy: Strategy) -> None:
    h, y = torch.randn(120, 5, 4, 3) + 2, torch.arange(120) % 4
    whole, parts = collected(strategy, h, y, 1), collected(strategy, h, y, 7)
    a, b = beyond(whole, 3 * h), beyond(parts, 3 * h)
    same_axes = strategy.coordinates == "moments"
    # Eigenvectors have no sign of their own, but distances have none either.
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 if same_axes else 5e-3)
    again = Coordinates.from_saved(whole.config(), whole.state_dict())
    assert torch.equal(beyond(again, h), beyond(whole, h))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(3, 40),
    st.integers(0, 40),
    st.integers(1, 40),
    st.sampled_from([0.01, 0.1, 1.0]),
)
def test_rounding_does_not_choose_axes(
    seed: int, width: int, still: int, rank: int, shrinkage: float
) -> None:
    """Units that never varied, and directions that never did, leave the axes nothing to choose."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(width, min(rank, width), generator=generator, dtype=torch.float64)
    dead = torch.randperm(width, generator=generator)[: min(still, width - 1)]
    root[dead] = 0
    covariance, means = root @ root.T, torch.zeros(1, width)
    noise = torch.randn(width, width, generator=generator, dtype=torch.float64)
    moved = covariance.diagonal() > 0  # what is always the same is so exactly
    noise = (noise + noise.T) * moved * moved[:, None]
    noisy = covariance + 1e-13 * covariance.abs().max() * noise
    first, second = (
        Prototypes(means, c, of="raw", shrinkage=shrinkage) for c in (covariance, noisy)
    )
    h = torch.randn(50, width, generator=generator)
    torch.testing.assert_close(first.unit_variance(h), second.unit_variance(h), rtol=1e-5, atol=0)
    # Whatever the axes are, they whiten.
    gram = first.axes.double() @ first.axes.double().T
    eye = torch.eye(width).double()
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().mean() * eye
    torch.testing.assert_close(gram @ shrunk, eye, rtol=0, atol=2e-3)


@pytest.mark.parametrize("shrinkage", [0.0, 1e-9, 1e-6])
def test_small_variances_are_whitened_too(shrinkage: float) -> None:
    spread = torch.tensor([1.0, 1.0, 1.0, 5e-5, 1e-5, 3e-6], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    covariance = basis * spread.square() @ basis.T
    means = torch.zeros(1, 6)
    axes = Prototypes(means, covariance, of="raw", shrinkage=shrinkage, dtype=torch.float64).axes
    eye = torch.eye(6).double()
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().mean() * eye
    torch.testing.assert_close(axes.T @ shrunk @ axes, eye, rtol=0, atol=1e-3)


def test_units_that_never_varied_are_axes() -> None:
    covariance = torch.zeros(6, 6).double()
    covariance[::2, ::2] = torch.tensor([[2.0, 1.0, 0.5], [1.0, 3.0, 1.0], [0.5, 1.0, 1.0]])
    covariance[0, 4] = covariance[4, 0] = 0.0
    axes = Prototypes(torch.zeros(1, 6), covariance, of="raw").axes
    for unit in (1, 3, 5):
        (own,) = axes[unit].nonzero(as_tuple=True)
        assert len(own) == 1
        assert int((axes[:, own] != 0).sum()) == 1
    axes = Prototypes(torch.zeros(1, 5), torch.zeros(5, 5), of="raw").axes  # not one that did
    assert torch.equal(axes != 0, torch.eye(5).bool())


def test_prototypes_by_hand() -> None:
    """Means, covariance and nearest class written out, example by example."""
    y = torch.arange(60) % 3
    h = torch.randn(60, 4) @ torch.randn(4, 4) + 3 * torch.randn(3, 4)[y]
    coordinates = collected(Strategy("prototypes", "raw", shrinkage=0.2), h.double(), y)
    means = torch.stack([h[y == c].double().mean(0) for c in range(3)])
    deviations = h.double() - means[y]
    covariance = deviations.T @ deviations / 60
    shrunk = 0.8 * covariance + 0.2 * covariance.diagonal().mean() * torch.eye(4).double()
    inverse = shrunk.inverse()
    points = 4 * torch.randn(20, 4).double()
    found = coordinates(points)
    assert found.shape == (20, 1)
    for point, distance in zip(points, found, strict=True):
        squared = [float((point - m) @ inverse @ (point - m)) for m in means]
        assert float(distance) == pytest.approx(math.sqrt(min(squared) / 4), rel=1e-8)
    torch.testing.assert_close(coordinates.unit_variance(points), found[:, 0].pow(3) / 3)
    coordinates.offset = torch.tensor([1.5]).double()
    beyond_offset = (found[:, 0] - 1.5).clamp_min(0).pow(3) / 3
    torch.testing.assert_close(coordinates.unit_variance(points), beyond_offset)
    assert (beyond_offset == 0).any()
    assert (beyond_offset > 0).any()
    # The principal axes: within classes the coordinates are uncorrelated.
    own = deviations @ coordinates.axes
    spread = own.T @ own / 60
    off = spread - spread.diagonal().diag()
    assert off.abs().max() < 1e-9


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_class_moments_against_plain_sums(n: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(n, 3, generator=generator).double() * 5
    y = torch.randint(classes, (n,), generator=generator)
    full, diagonal = ClassMoments(classes), ClassMoments(classes, diagonal=True)
    for part, labels in zip(h.split(7), y.split(7), strict=True):
        full.update(part, labels)
        diagonal.update(part, labels)
    means = torch.stack(
        [h[y == c].mean(0) if bool((y == c).any()) else torch.zeros(3) for c in range(classes)]
    )
    deviations = h - means[y]
    torch.testing.assert_close(full.means, means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(full.scatter, deviations.T @ deviations, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(diagonal.scatter, full.scatter.diagonal(), rtol=1e-9, atol=1e-9)
    assert torch.equal(full.counts, torch.bincount(y, minlength=classes).double())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_class_that_comes_late_far_away(shards: int) -> None:
    """Its spread must not drown in its distance from the others."""
    noise = torch.randn(400, 3).double()
    y = torch.arange(400) // 200
    h = 1e6 * y[:, None] + 0.1 * noise
    parts = [ClassMoments(2) for _ in range(shards)]
    for number, (rows, labels) in enumerate(zip(h.split(50), y.split(50), strict=True)):
        parts[number * shards // 8].update(rows, labels)
    moments = ClassMoments(2)
    for part in parts:
        moments.merge(part.state)
    expected = sum(torch.cov(0.1 * noise[y == c].T, correction=0) for c in (0, 1)) / 2
    torch.testing.assert_close(moments.covariance, expected, rtol=1e-6, atol=1e-9)
    constant = ClassMoments(2)
    for label in (0, 1):
        constant.update(torch.full((5, 3), 0.1 + 7 * label), torch.full((5,), label))
    assert constant.covariance.abs().max() == 0


@pytest.mark.parametrize("strategy", [("whitened", "raw"), ("prototypes", "pooled")])
def test_layers_before_one_that_works_in_place(strategy: tuple[str, str]) -> None:
    x = torch.randn(100, 4)
    torch.manual_seed(1)
    models = []
    for inplace in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 3))
        recipe = rgpr.ResidualRecipe(hidden=Strategy(*strategy))
        models.append(rgpr.RGPR(network, layers=["0"], residual=recipe).fit([x[:50], x[50:]]))
    torch.testing.assert_close(models[0].variance(x), models[1].variance(x))


def test_thousands_of_classes_take_no_cube() -> None:
    """(B, C, D) would be eight gigabytes here."""
    classes, width = 4000, 256
    means = torch.randn(classes, width)
    coordinates = Prototypes(means, torch.eye(width).double())
    h = torch.randn(2000, width)
    distance = coordinates(h)
    some = torch.randint(2000, (20,))
    nearest = torch.cdist(h[some].double(), means.double()).amin(1) / width**0.5
    torch.testing.assert_close(distance[some, 0], nearest, rtol=1e-5, atol=0)


def test_wide_layers_keep_variances_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpr.residual.collecting._WIDEST", 3)
    h, y = torch.randn(50, 4) * torch.tensor([1.0, 2.0, 5.0, 0.1]), torch.arange(50) % 2
    coordinates = collected(Strategy("prototypes", "raw", shrinkage=0.0), h, y)
    assert coordinates.axes.shape == (4,)
    means = torch.stack([h[y == c].mean(0) for c in range(2)])
    scale = (h - means[y]).square().mean(0).sqrt()
    nearest = torch.cdist(h.double() / scale, means.double() / scale).amin(1) / 2
    torch.testing.assert_close(coordinates(h)[:, 0], nearest, rtol=1e-4, atol=0)
    torch.testing.assert_close(coordinates.unit_variance(h), nearest**3 / 3, rtol=1e-4, atol=0)


def random_prototypes(seed: int, width: int, classes: int, starts: bool) -> Prototypes:
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, width, generator=generator, dtype=torch.float64)
    root = torch.randn(width, width, generator=generator, dtype=torch.float64)
    coordinates = Prototypes(means, root @ root.T, of="raw", dtype=torch.float64)
    if starts:
        coordinates.offset = torch.rand(1, generator=generator, dtype=torch.float64)
    return coordinates


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(2, 6), st.booleans())
def test_no_jump_where_another_prototype_is_nearest(
    seed: int, width: int, classes: int, starts: bool
) -> None:
    """On a segment ``u`` changes half as much between points that are half as far apart."""
    coordinates = random_prototypes(seed, width, classes, starts)
    generator = torch.Generator().manual_seed(seed + 1)
    ends = 4 * torch.randn(2, width, generator=generator, dtype=torch.float64)
    centers = coordinates.anchors() @ coordinates.axes

    def at(t: Tensor) -> Tensor:
        return ends[0] + t[:, None] * (ends[1] - ends[0])

    def nearest(t: float) -> int:
        point = at(torch.tensor([t], dtype=torch.float64)) @ coordinates.axes
        return int(torch.cdist(point, centers).argmin())

    start = nearest(0.0)
    assume(start != nearest(1.0))

    def largest_change(steps: int) -> float:
        t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        return float(coordinates.unit_variance(at(t)).diff().abs().max())

    for wide, fine in itertools.pairwise(largest_change(1000 * 2**k) for k in range(4)):
        assert fine <= 0.55 * wide
    # A small jump could hide among these steps, so here is one across the switch itself.
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if nearest(middle) == start else (low, middle)
    assert nearest(low) != nearest(high)
    below, above = coordinates.unit_variance(at(torch.tensor([low, high], dtype=torch.float64)))
    assert abs(float(above - below)) <= 1e-9 * (1 + float(below))


@pytest.mark.parametrize("wide", [False, True], ids=["axes", "variances alone"])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_activations_far_from_zero_keep_their_digits(seed: int, wide: bool) -> None:
    """Also in float32: against float64, and a row alone against the row in a batch."""
    h, y = far_from_zero(seed)
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("rgpr.residual.collecting._WIDEST", 3)
        coordinates = collected(Strategy("prototypes", "pooled"), h, y)
    assert coordinates.axes.dtype == torch.float32
    assert coordinates.axes.dim() == (1 if wide else 2)
    u = coordinates.unit_variance(h)
    alone = torch.cat([coordinates.unit_variance(row[None]) for row in h])
    torch.testing.assert_close(alone, u, rtol=1e-6, atol=0)
    distance = coordinates(h)[:, 0]
    torch.testing.assert_close(distance.pow(3) / 3, u, rtol=1e-5, atol=0)
    if not wide:
        expected = nearest_distance(h, h, y).pow(3) / 3
        torch.testing.assert_close(u, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("apart", [10.0, 100.0, 1e4])
def test_classes_far_apart_keep_a_row_from_depending_on_its_batch(apart: float) -> None:
    """By up to 3e-3 at a distance of 10 000 spreads, and by 2e-6 at ten, it did."""
    y = torch.arange(400) % 5
    mix = torch.randn(48, 48) / 48**0.5
    h = apart * torch.randn(5, 48)[y] + torch.randn(400, 48) @ mix
    coordinates = collected(Strategy("prototypes", "pooled"), h, y)
    u = coordinates.unit_variance(h)
    for size in (1, 2, 7, 64):
        parts = torch.cat([coordinates.unit_variance(rows) for rows in h.split(size)])
        torch.testing.assert_close(parts, u, rtol=1e-6, atol=0)
    expected = nearest_distance(h, h, y).pow(3) / 3
    torch.testing.assert_close(u, expected, rtol=3e-7 * (10 + apart), atol=0)


def test_reductions() -> None:
    images, tokens = torch.randn(3, 4, 5, 6), torch.randn(3, 7, 4).transpose(1, 2)
    assert torch.equal(reduce(images, "raw"), images.flatten(1))
    torch.testing.assert_close(reduce(images, "pooled"), images.mean((2, 3)))
    torch.testing.assert_close(reduce(tokens, "pooled"), tokens.mean(2))
    unit = reduce(images, "normalised")
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(reduce(1e30 * images, "normalised"), unit)
    assert reduce(0 * images, "normalised").isfinite().all()


def test_far_rows_neither_overflow_nor_turn_to_nan() -> None:
    coordinates = Prototypes(torch.randn(5, 4), torch.eye(4).double())
    h = torch.tensor([[1e37, 0, 0, 1.0], [torch.inf, 0, 0, 1], [torch.nan, 0, 0, 1], [1, 1, 1, 1]])
    for found in (coordinates(h)[:, 0], (3 * coordinates.unit_variance(h)) ** (1 / 3)):
        assert float(found[0]) == pytest.approx(1e37 / 2, rel=1e-5)
        assert found[1] == torch.inf
        assert found[2].isnan()
        assert found[3] < 2


class TestOffsets:
    """Features that start where the data end."""

    def fitted(self, offset: float) -> tuple[rgpr.RGPR, Tensor]:
        x = torch.randn(80, 4).double()
        recipe = rgpr.ResidualRecipe(input=Strategy(offset=offset))
        network = mlp(4, 1, width=6, hidden=1).double()
        model = rgpr.RGPR(network, layers="input", likelihood="regression", residual=recipe)
        return model.fit(x.split(11)), x

    def test_the_kernel_is_zero_at_every_training_point(self) -> None:
        model, x = self.fitted(1.0)
        coordinates = model.residual.at(0)
        z, far = coordinates(x), coordinates(10 * torch.randn(30, 4).double())
        assert (dscs(z[:, None], far[None], offset=coordinates.offset) == 0).all()
        assert (dscs_gram(z, offset=coordinates.offset) == 0).all()
        assert (model.variance(x) == 0).all()
        assert (model.variance(3 * x) > 0).any()

    def test_the_approximation_is_the_posterior(self) -> None:
        """Proposition 1 with an equals sign."""
        model, x = self.fitted(1.0)
        coordinates = model.residual.at(0)

        def gram(a: Tensor, b: Tensor) -> Tensor:
            return 0.7 * dscs_gram(coordinates(a), coordinates(b), offset=coordinates.offset)

        network = model.posterior.network
        count = sum(p.numel() for p in network.parameters())
        process = ResidualProcess(network, torch.eye(count).double(), gram, noise=0.1)
        y, points = torch.randn(80).double(), 6 * torch.randn(25, 4).double()
        exact, approximate = process.exact(points, x, y), process.approximate(points, x, y)
        for a, b in zip(exact, approximate, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        plain = ResidualProcess(
            network,
            torch.eye(count).double(),
            lambda a, b: dscs_gram(coordinates(a), coordinates(b)),
            0.1,
        )  # without the offset it is an approximation only
        gap = plain.exact(points, x, y)[1] - plain.approximate(points, x, y)[1]
        assert gap.abs().max() > 1e-4

    def test_quantiles(self) -> None:
        model, x = self.fitted(0.9)
        z = model.residual.at(0)(x).abs()
        share = (z <= model.residual.at(0).offset).double().mean(0)
        torch.testing.assert_close(share, torch.full_like(share, 0.9), atol=0.02, rtol=0)

    def test_float32_maximum_is_exact_too(self) -> None:
        x = torch.rand(300, 7) * torch.tensor([1e-3, 1, 1e3, 1, 1, 5, 1e6]) + 1000
        recipe = rgpr.ResidualRecipe(input=Strategy(offset=1.0))
        model = rgpr.RGPR(mlp(7), layers="input", residual=recipe).fit(x.split(13))
        assert (model.variance(x) == 0).all()


def test_labels_or_predictions() -> None:
    x, y = blobs(3, n=90)
    network = mlp()
    with torch.no_grad():
        predicted = network(x).argmax(1)
    by_labels = rgpr.RGPR(network).fit([(x, y)])
    alone, told = rgpr.RGPR(network).fit([x]), rgpr.RGPR(network).fit([(x, predicted)])
    assert torch.equal(alone.variance(3 * x), told.variance(3 * x))
    assert not torch.equal(alone.variance(3 * x), by_labels.variance(3 * x))
    with pytest.raises(ValueError, match=r"batch 0 has the label 3 .* 3 classes, 0 to 2"):
        rgpr.RGPR(network).fit([(x, torch.full((90,), 3))])
    binary = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    one = rgpr.RGPR(binary).fit([(x, y % 2)])
    assert len(one.residual.at(1).centers) == 2
    regression = rgpr.RGPR(mlp(), likelihood="regression").fit([(x, torch.randn(90, 3))])
    assert len(regression.residual.at(1).centers) == 1


class Shift(nn.Module):
    """Works in full precision also under autocast, which leaves additions alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 100


@pytest.mark.parametrize("kind", ["moments", "whitened", "prototypes"])
@pytest.mark.parametrize("of", ["raw", "pooled", "normalised"])
def test_autocast_does_not_reach_the_coordinates(kind: str, of: str) -> None:
    """Features would lose their digits in half precision, whatever they are measured from."""
    x, y = torch.randn(200, 4), torch.arange(200) % 3
    recipe = rgpr.ResidualRecipe(hidden=Strategy(kind, of), combine="onset")
    network = nn.Sequential(Shift(), nn.Linear(4, 3))
    model = rgpr.RGPR(network, layers=["0"], residual=recipe).fit([(x, y)])
    expected, variance = model._extension().read(3 * x).u, model.variance(3 * x)
    assert (expected > 0).all()
    assert (variance > 0).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ torch.eye(4)).dtype == torch.bfloat16  # it is on
        assert torch.equal(model._extension().read(3 * x).u, expected)
        assert torch.equal(model.variance(3 * x), variance)
        again = Coordinates.from_saved(
            model.residual.at(1).config(), model.residual.at(1).state_dict()
        )
    for name, tensor in again.named_buffers():  # what is derived from the saved tensors, too
        assert torch.equal(tensor, model.residual.at(1).get_buffer(name))


def test_words_and_recipes() -> None:
    assert rgpr.RGPR(mlp()).recipe == RESIDUALS["onset"]
    assert rgpr.RGPR(mlp(), residual="paper").recipe == RESIDUALS["paper"]
    for old in ("best", "adaptive"):
        with pytest.raises(ValueError, match=f"residual='{old}' is not one of 'onset', 'paper'"):
            rgpr.RGPR(mlp(), residual=old)
    with pytest.raises(ValueError, match="would not go to 1/C"):
        rgpr.ResidualRecipe(input=Strategy("prototypes", "normalised"))
    with pytest.raises(ValueError, match="combine='product' is not one of 'sum', 'onset'"):
        rgpr.ResidualRecipe(combine="product")
    with pytest.raises(TypeError, match="residual=None"):
        rgpr.RGPR(mlp(), residual=None)
    for bad in ({"coordinates": "nearest"}, {"of": "mean"}, {"offset": 1.5}, {"shrinkage": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Strategy(**bad)
