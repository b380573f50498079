from __future__ import annotations

import pytest
import torch

from rgpr.coordinates import Standardizer
from rgpr.kernels import dscs_diag
from rgpr.residual import Residual


def residual(sigma2: list[float] | None = None) -> Residual:
    coordinates = [Standardizer(torch.randn(n), torch.rand(n) + 0.5) for n in (3, 8)]
    return Residual(coordinates, None if sigma2 is None else torch.tensor(sigma2))


def test_u_is_the_kernel_of_the_standardised_representation() -> None:
    r, h = residual(), torch.randn(5, 2, 4)
    z = (h.flatten(1).double() - r.coordinates[1].mean) / r.coordinates[1].scale
    u = r.unit_variance(1, h)
    assert u.dtype == torch.float64
    torch.testing.assert_close(u, dscs_diag(z), rtol=1e-5, atol=0)


def test_u_does_not_depend_on_how_many_rows_fit_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r, h = residual(), torch.randn(7, 8)
    whole = r.unit_variance(1, h)
    monkeypatch.setattr("rgpr.fused._CACHED", 16)
    torch.testing.assert_close(r.unit_variance(1, h), whole)


@pytest.mark.parametrize("unit", [1e-15, 1e-3, 1.0, 1e6, 1e15])
def test_u_in_any_unit(unit: float) -> None:
    """Data in metres or in light years: cubes must neither overflow nor vanish."""
    h, mean, std = torch.randn(6, 20), torch.randn(20), torch.rand(20) + 0.5
    reference = Residual([Standardizer(mean, std)]).unit_variance(0, h)
    scaled = Residual([Standardizer(unit * mean, unit * std)]).unit_variance(0, unit * h)
    torch.testing.assert_close(scaled, reference, rtol=1e-4, atol=0)


def test_v_is_linear_in_sigma2() -> None:
    u = torch.rand(5, 2, dtype=torch.float64)
    expected = 0.5 * u[:, 0] + 2 * u[:, 1]
    torch.testing.assert_close(residual([0.5, 2.0])(u), expected)
    assert torch.equal(residual()(u), torch.zeros(5, dtype=torch.float64))


def test_a_kernel_that_is_off_stays_off_at_infinity() -> None:
    u = torch.tensor([[1.0, torch.inf], [torch.inf, 1.0]], dtype=torch.float64)
    assert residual([0.5, 0.0])(u).tolist() == [0.5, torch.inf]
