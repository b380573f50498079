from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rgpr._network.moments import Moments
from rgpr.residual.coordinates import Standardizer


def moments_of(batches: list[torch.Tensor]) -> Moments:
    moments = Moments()
    for batch in batches:
        moments.update(batch)
    return moments


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_independent_of_batch_size_and_order(
    seed: int, sizes: list[int], center: float, dtype: torch.dtype
) -> None:
    """To 1e-6, against a two-pass float64 reference, also far from zero."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(sum(sizes) + 2, 3, generator=generator, dtype=torch.float64)
    data = (center + data * torch.tensor([0.1, 1.0, 100.0], dtype=torch.float64)).to(dtype)
    shuffled = data[torch.randperm(len(data), generator=generator)]
    for batches in (data.split([*sizes, 2]), shuffled.split(7), [data], shuffled.split(1)):
        moments = moments_of(list(batches))
        assert moments.count == len(data)
        torch.testing.assert_close(moments.mean, data.double().mean(0), rtol=1e-6, atol=1e-12)
        expected = data.double().std(0, correction=0)
        # A spread within the rounding of the values themselves counts as none.
        eps = 4 * torch.finfo(dtype).eps
        expected = torch.where(expected <= eps * data.double().mean(0).abs(), 0.0, expected)
        torch.testing.assert_close(moments.std, expected, rtol=1e-6, atol=0)


def test_a_constant_unit_has_no_spread_in_any_batching() -> None:
    data = torch.full((1000, 2), 0.1)
    data[:, 1] = torch.randn(1000)
    for size in (1, 7, 1000):
        std = moments_of(list(data.split(size))).std
        assert std[0] == 0
        assert std[1] > 0.5


def test_every_entry_is_a_unit_and_half_precision_is_summed_in_float64() -> None:
    data = torch.randn(64, 3, 4, 5)
    moments = moments_of(list(data.split(16)))
    assert moments.mean.shape == (60,)
    for dtype in (torch.float16, torch.bfloat16):
        half = (100 + data).to(dtype)
        ours = moments_of(list(half.split(16)))
        torch.testing.assert_close(ours.mean, half.double().flatten(1).mean(0), rtol=1e-6, atol=0)
    assert moments_of([data[:0]]).count == 0


def test_standardizer() -> None:
    mean, std = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 0.0, 4.0]).double()
    h = torch.tensor([[2.0, 2.0, 3.0], [1.0, 3.0, -1.0]])
    # The dead unit in the middle is measured in the median spread of the others.
    scale = torch.tensor([1.0, 1.0, 4.0])
    torch.testing.assert_close(Standardizer(mean, std)(h), (h - mean.float()) / scale)
    torch.testing.assert_close(Standardizer(mean, std, r=2.0)(h), (h - mean.float()) / scale / 2)


def test_a_dead_unit_that_fires_counts() -> None:
    training = torch.randn(100, 2)
    training[:, 1] = 0
    moments = moments_of([training])
    standardize = Standardizer(moments.mean, moments.std)
    quiet, fires = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    assert standardize(quiet)[0, 1] == 0
    assert standardize(fires)[0, 1] == pytest.approx(5 / float(moments.std[0]), rel=1e-5)


def test_a_layer_of_constants_is_measured_in_ones() -> None:
    standardize = Standardizer(torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(standardize(torch.zeros(1, 3)), -torch.ones(1, 3))


def test_statistics_keep_their_precision_when_the_network_is_cast() -> None:
    standardize = Standardizer(torch.full((2,), 1 / 3).double(), torch.ones(2).double())
    assert standardize.mean.dtype == torch.float32
    assert standardize.half().mean.dtype == torch.float32
    assert standardize.double().mean.dtype == torch.float32
    assert standardize.to("meta").mean.device.type == "meta"
    wide = Standardizer(torch.zeros(2), torch.ones(2), dtype=torch.float64)
    assert wide.float().mean.dtype == torch.float64
    assert standardize.mean.shape == (2,)
