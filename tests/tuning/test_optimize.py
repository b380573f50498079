from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rgpr.tuning.optimize import maximise

BOUND = torch.full((3,), 10.0, dtype=torch.float64)


def hill(z: Tensor) -> Iterator[Tensor]:
    """Narrow along one direction, wide along another, flat along the last; largest at (1, -2)."""
    yield -100 * ((z[0] - 1) + 0.3 * (z[1] + 2)).cosh()
    yield -1e-4 * (z[1] + 2).square() * (1 + 0.1 * (z[1] + 2))


@pytest.mark.parametrize("at", [-1.0, 0.0, 0.5, 3.0])
def test_the_way_to_an_optimum_does_not_show(at: float) -> None:
    best = maximise(hill, [torch.full_like(BOUND, at)], -BOUND, BOUND, switchable=0)
    assert best.z[:2].tolist() == pytest.approx([1, -2], abs=1e-7)
    assert best.value == pytest.approx(-100)
    assert best.gradient < 1e-8
    assert best.converged
    assert best.history == sorted(best.history)


def test_what_ends_at_a_bound_stays_there() -> None:
    best = maximise(lambda z: [z.sum()], [torch.zeros_like(BOUND)], -BOUND, BOUND, switchable=0)
    assert torch.equal(best.z, BOUND)


def test_no_step_makes_it_worse() -> None:
    def rough(z: Tensor) -> Iterator[Tensor]:
        yield -(z.square() + 1e-3 * (1e4 * z).sin()).sum()

    start = torch.full_like(BOUND, 0.3)
    best = maximise(rough, [start], -BOUND, BOUND, switchable=0)
    assert best.value == pytest.approx(float(sum(rough(best.z))))
    assert best.value >= max(best.history) - 1e-9
