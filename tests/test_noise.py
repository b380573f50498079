from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rgpr import noise

ALL = {
    "uniform": noise.uniform,
    "smoothed": noise.smoothed,
    "permuted": noise.permuted,
    "far_away": noise.far_away,
    "like_data": noise.like_data,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_dtype_and_seed(make: noise.Noise, dtype: torch.dtype) -> None:
    x = torch.rand(6, 3, 9, 8).to(dtype)
    before = x.clone()
    first, again, other = (make(x, generator=seeded(s)) for s in (1, 1, 2))
    assert first.shape == x.shape
    assert first.dtype == dtype
    assert first.device == x.device
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (make is noise.far_away)
    assert torch.equal(x, before)
    assert make(x[:0], generator=seeded()).shape == (0, 3, 9, 8)


def test_uniform_fills_its_range() -> None:
    low, high = torch.tensor([-1.0, 2.0])[:, None, None], torch.tensor([0.0, 6.0])[:, None, None]
    values = noise.uniform(torch.zeros(200, 2, 8, 8), low=low, high=high, generator=seeded())
    for channel, (a, b) in enumerate(((-1, 0), (2, 6))):
        sample = values[:, channel].flatten()
        assert a <= sample.min() < a + 0.01 * (b - a)
        assert b - 0.01 * (b - a) < sample.max() <= b
        assert sample.mean() == pytest.approx((a + b) / 2, abs=0.02 * (b - a))


@given(st.integers(4, 33), st.floats(0.3, 4.0))
def test_the_blur_is_scipys(size: int, sigma: float) -> None:
    from scipy.ndimage import gaussian_filter

    image = torch.rand(size, size, generator=seeded(size), dtype=torch.float64)
    matrix = noise._blur_matrix(size, torch.tensor([sigma], dtype=torch.float64))[0]
    expected = torch.from_numpy(gaussian_filter(image.numpy(), sigma, mode="reflect"))
    torch.testing.assert_close(matrix @ image @ matrix.T, expected, rtol=1e-9, atol=1e-9)


def test_smoothed_noise_step_by_step() -> None:
    """With the ranges closed to a point, only the permutation is random."""
    from scipy.ndimage import gaussian_filter

    x = torch.rand(3, 2, 12, 10, dtype=torch.float64)
    made = noise.smoothed(x, blur=(1.5, 1.5), gain=(8.0, 8.0), generator=seeded(4))
    order = torch.rand(3, 1, 120, generator=seeded(4), dtype=torch.float64).argsort(-1)
    for image, result, places in zip(x, made, order[:, 0], strict=True):
        shuffled = image.flatten(1)[:, places].reshape(2, 12, 10)  # channels move together
        blurred = torch.stack([torch.from_numpy(gaussian_filter(c.numpy(), 1.5)) for c in shuffled])
        expected = 1 / (1 + (-8 * (blurred - 0.5)).exp())
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_smoothed_noise_in_other_bounds_is_the_same_noise() -> None:
    x = torch.rand(5, 3, 16, 16)
    mean = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    std = torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    plain = noise.smoothed(x, generator=seeded())
    low, high = (0 - mean) / std, (1 - mean) / std
    normalised = noise.smoothed((x - mean) / std, low=low, high=high, generator=seeded())
    torch.testing.assert_close(normalised, (plain - mean) / std, rtol=1e-4, atol=1e-4)


def test_smoothed_noise_is_smooth_and_unlike_its_image() -> None:
    x = torch.rand(50, 1, 28, 28)
    made = noise.smoothed(x, generator=seeded())
    assert made.min() >= 0
    assert made.max() <= 1
    steps = (made.diff(dim=3).abs().mean((1, 2, 3)), made.std((1, 2, 3)))
    assert (steps[0] < steps[1]).all()  # neighbours are alike; in white noise they differ by more


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.rand(4, 7), r"\(4, 7\).*permuted"), (3 * torch.rand(4, 1, 8, 8), "low= and high=")],
)
def test_smoothed_noise_refuses(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise.smoothed(x)


def test_permuted_keeps_the_marginals() -> None:
    x = torch.randn(500, 3) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 10.0, -3.0])
    x[:, 1] = x[:, 0] * 2  # dependent
    made = noise.permuted(x, scale=(1.0, 1.0), generator=seeded())
    torch.testing.assert_close(made.sort(0).values, x.sort(0).values, rtol=1e-5, atol=1e-5)
    assert torch.corrcoef(made.T)[0, 1].abs() < 0.15
    stretched = noise.permuted(x, scale=(3.0, 3.0), generator=seeded())
    torch.testing.assert_close(stretched - x.mean(0), 3 * (made - x.mean(0)), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="positive"):
        noise.permuted(x, scale=(0.0, 1.0))
    with pytest.raises(ValueError, match="one row"):
        noise.permuted(x[:1])


def test_rows_one_by_one_are_mixed_all_the_same() -> None:
    x = torch.randn(1000, 2)
    made = list(noise.NoiseLoader(noise.permuted, x.split(1)))
    assert sum(map(len, made)) == 1000
    assert min(map(len, made)) >= 256
    assert not torch.isclose(torch.cat(made), x).all(1).any()


def test_far_away_scales() -> None:
    x = torch.randn(3, 2)
    assert torch.equal(noise.far_away(x, alpha=50.0), 50 * x)


def test_the_default_depends_on_the_data() -> None:
    images, rows = torch.rand(20, 3, 8, 8), torch.randn(20, 7)
    assert noise.like_data(images, generator=seeded()).amax() <= images.amax() + 1e-5
    assert torch.equal(
        noise.like_data(rows, generator=seeded()), noise.permuted(rows, generator=seeded())
    )
    constant = torch.full((4, 1, 8, 8), 0.5)
    assert noise.like_data(constant, generator=seeded()).isfinite().all()


def test_a_loader_of_noise_is_the_same_at_every_pass() -> None:
    source = [(torch.rand(5, 2), torch.zeros(5)), {"x": torch.rand(3, 2)}]
    loader = noise.NoiseLoader(noise.uniform, source, seed=3, high=2.0)
    first, again = list(loader), list(loader)
    assert [len(x) for x in first] == [8]  # small batches are put together
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.cat(first).max() > 1
    assert not torch.equal(first[0], next(iter(noise.NoiseLoader(noise.uniform, source, seed=4))))
