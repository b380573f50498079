"""Training inputs measured without themselves: the closed forms against fitting anew without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rgpr
from networks import Task
from rgpr.residual.collecting import Collector
from rgpr.residual.recipes import Strategy


def collected(strategy: Strategy, h: Tensor, y: Tensor, classes: int, r: float) -> Collector:
    collector = Collector(strategy, r)
    for rows, labels in zip(torch.split(h, 7), torch.split(y, 7), strict=True):
        taken = collector.take(rows)
        if collector.needs_classes:
            collector.update(taken, labels, classes)
    return collector


def anew(strategy: Strategy, h: Tensor, y: Tensor, classes: int, r: float) -> Tensor:
    """``u`` of every row, by a fit on all rows but this one."""
    found = []
    for index in range(len(h)):
        others = torch.arange(len(h)) != index
        coordinates = collected(strategy, h[others], y[others], classes, r).finish()
        found.append(coordinates.unit_variance(h[index : index + 1]))
    return torch.cat(found)


@given(
    coordinates=st.sampled_from(["moments", "whitened", "prototypes"]),
    shrinkage=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    rows=st.integers(6, 30),
    units=st.integers(1, 12),
    classes=st.integers(1, 4),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    shift=st.sampled_from([0.0, 50.0]),
    still=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_the_closed_forms_are_those_of_a_fit_without_the_row(
    coordinates: str,
    shrinkage: float,
    rows: int,
    units: int,
    classes: int,
    scale: float,
    shift: float,
    still: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (rows,), generator=generator)
    h = torch.randn(rows, units, generator=generator, dtype=torch.float64)
    h = scale * (h + 2 * torch.randn(classes, units, generator=generator, dtype=torch.float64)[y])
    h = h + scale * shift
    if still:  # a unit that never varies, and one that a single row moves
        h[:, 0] = scale
        h[1:, -1] = scale
    strategy = Strategy(coordinates, "pooled", shrinkage=shrinkage)
    collector = collected(strategy, h, y, classes, 1.5)
    without = collector.without_each()
    own = y if collector.needs_classes else torch.zeros_like(y)
    found, expected = without(h, own, None), anew(strategy, h, y, classes, 1.5)
    counted = without.counted(own)
    assert bool((counted == ((y[:, None] == y).sum(1) > 1)).all()) or coordinates != "prototypes"
    torch.testing.assert_close(found[counted], expected[counted], rtol=1e-5, atol=1e-9)


def test_wide_layers_have_variances_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpr.residual.collecting._WIDEST", 4)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(20) % 3
    h = torch.randn(20, 6, generator=generator, dtype=torch.float64) + y[:, None]
    strategy = Strategy("prototypes", "pooled")
    found = collected(strategy, h, y, 3, 1.0).without_each()(h, y, None)
    torch.testing.assert_close(found, anew(strategy, h, y, 3, 1.0), rtol=1e-6, atol=1e-9)


def test_offsets_are_those_of_all_the_data() -> None:
    h = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.zeros(20, dtype=torch.long)
    without = collected(Strategy("whitened", "pooled"), h, y, 1, 1.0).without_each()
    plain = (3 * without(h, y, None)).pow(1 / 3)
    offset = torch.tensor([0.5], dtype=torch.float64)
    expected = (plain - 0.5).clamp_min(0).pow(3) / 3
    torch.testing.assert_close(without(h, y, offset), expected)


def test_one_huge_row_does_not_spoil_the_others() -> None:
    h = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h[0] = 1e9
    y = torch.arange(40) % 2
    for coordinates in ("moments", "prototypes"):
        strategy = Strategy(coordinates, "pooled")
        without = collected(strategy, h, y, 2, 1.0).without_each()
        u = without(h, y, None)
        expected = anew(strategy, h, y, 2, 1.0)
        assert bool(u.isfinite().all())
        torch.testing.assert_close(u[1:], expected[1:], rtol=1e-5, atol=1e-9)
        assert float(u[0]) > 1e6 * float(u[1:].max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_that_one_row_alone_moved(dtype: torch.dtype) -> None:
    """Rare pixels and words: what is left of their spread is rounding, and counts as none."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(60, 40, generator=generator)
    h[:, 20:] = 0
    rows = torch.randint(0, 60, (20,), generator=generator)
    h[rows, torch.arange(20, 40)] = torch.rand(20, generator=generator)
    h, y = h.to(dtype), torch.arange(60) % 3
    for coordinates in ("moments", "whitened", "prototypes"):
        strategy = Strategy(coordinates, "pooled")
        collector = collected(strategy, h, y, 3, 1.0)
        own = y if collector.needs_classes else torch.zeros_like(y)
        found, expected = collector.without_each()(h, own, None), anew(strategy, h, y, 3, 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("labels", [[0, 0], [0, 0, 1], [0, 0, 1, 1]])
def test_hardly_any_data(labels: list[int], seed: int) -> None:
    """Where nothing is left to measure by, scales are one, as they are for such data."""
    h = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(seed))
    y = torch.tensor(labels)
    for coordinates in ("moments", "whitened", "prototypes"):
        strategy = Strategy(coordinates, "pooled")
        collector = collected(strategy, h, y, 2, 1.0)
        without = collector.without_each()
        own = y if collector.needs_classes else torch.zeros_like(y)
        found, expected = without(h, own, None), anew(strategy, h, y, 2, 1.0)
        counted = without.counted(own)
        torch.testing.assert_close(found[counted], expected[counted], rtol=1e-2, atol=1e-6)


def test_few_digits_keep_their_protection(digits: Task) -> None:
    """A single rare pixel must not set where the variance sets in."""
    for count in (60, 100, 150):
        x, y = digits.x[:count], digits.y[:count]
        model = rgpr.RGPR(digits.network).fit([(x, y)], progress=False)
        with torch.no_grad():
            assert model(100 * digits.x).amax(1).mean() < 0.2
