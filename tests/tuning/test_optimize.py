from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rgpr.tuning.optimize import maximise

BOUND = torch.full((3,), 10.0, dtype=torch.float64)


def test_the_search_finds_the_top_of_a_hill_it_does_not_start_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flat where it starts; one of several starts sees the slope."""
    top = torch.tensor([2.0, -1.0]).double()

    def objective(z: Tensor) -> list[Tensor]:
        return [torch.exp(-(z - top).square().sum() / 4)]

    start, bound = torch.full((2,), -22.0).double(), torch.full((2,), 23.0).double()
    stuck = maximise(objective, [start], (-bound, bound), switchable=0)
    assert stuck.value < 1e-6
    found = maximise(objective, [start, 0 * start], (-bound, bound), switchable=2)
    torch.testing.assert_close(found.z, top, atol=1e-3, rtol=0)
    assert found.converged
    assert found.history[-1] == pytest.approx(1.0, abs=1e-6)
    monkeypatch.setattr("rgpr.tuning.optimize._ITERATIONS", 1)
    hurried = maximise(objective, [0 * start], (-bound, bound), switchable=0)
    assert not hurried.converged


def hill(z: Tensor) -> Iterator[Tensor]:
    """Narrow along one direction, wide along another, flat along the last; largest at (1, -2)."""
    yield -100 * ((z[0] - 1) + 0.3 * (z[1] + 2)).cosh()
    yield -1e-4 * (z[1] + 2).square() * (1 + 0.1 * (z[1] + 2))


@pytest.mark.parametrize("at", [-1.0, 0.0, 0.5, 3.0])
def test_the_way_to_an_optimum_does_not_show(at: float) -> None:
    best = maximise(hill, [torch.full_like(BOUND, at)], (-BOUND, BOUND), switchable=0)
    assert best.z[:2].tolist() == pytest.approx([1, -2], abs=1e-7)
    assert best.value == pytest.approx(-100)
    assert best.gradient < 1e-8
    assert best.converged
    assert best.history == sorted(best.history)


def test_what_ends_at_a_bound_stays_there() -> None:
    def slope(z: Tensor) -> Iterator[Tensor]:
        yield -(z[0] - 1).square() + 5 * z[1] - z[2]

    best = maximise(slope, [torch.zeros_like(BOUND)], (-BOUND, BOUND), switchable=0)
    assert best.z.tolist() == pytest.approx([1, 10, -10], abs=1e-9)
    assert best.converged


def test_a_scale_on_its_way_to_zero_leaves_the_others_their_digits() -> None:
    def tail(z: Tensor) -> Iterator[Tensor]:
        yield -(z[0] - 1).cosh() - 0.3 * (z[0] + z[1]).cosh() - 1e-6 * z[2].exp()

    for at in (-1.0, 0.3, 2.0):
        best = maximise(tail, [torch.full_like(BOUND, at)], (-BOUND, BOUND), switchable=0)
        assert best.z[:2].tolist() == pytest.approx([1, -1], abs=1e-8)


def test_a_step_too_long_leaves_the_others_their_digits() -> None:
    """So little slope that the climb leaves it be, and Newton's method leaps across its top."""

    def slope(z: Tensor) -> Iterator[Tensor]:
        yield -(z[0] - 1).cosh() - 0.3 * (z[0] + z[1]).cosh() - 5e-8 * (1 + z[2].square()).sqrt()

    for at in (-1.0, 0.3, 2.0):
        start = torch.tensor([at, at, 2.0], dtype=torch.float64)
        best = maximise(slope, [start], (-BOUND, BOUND), switchable=0)
        assert best.z[:2].tolist() == pytest.approx([1, -1], abs=1e-8)


def test_no_step_makes_it_worse() -> None:
    """At an edge there is no second derivative, and Newton's method goes to and fro across it."""

    def edge(z: Tensor) -> Iterator[Tensor]:
        yield -1e-4 * (z - 1).abs().sum()

    for at in (0.3, 0.99999, 1.00002, 2.0):
        best = maximise(edge, [torch.full_like(BOUND, at)], (-BOUND, BOUND), switchable=0)
        assert best.value == pytest.approx(float(sum(edge(best.z))), abs=1e-15)
        assert best.value >= max(best.history) - 1e-11


def test_the_search_stays_within_its_bounds_and_ends_where_it_is_flat_across_them() -> None:
    def gentle(z: Tensor) -> Iterator[Tensor]:
        yield 0.5 * z[0] - 0.25 * z[1] + 0 * z[2]

    start = torch.tensor([50.0, -50.0, 0.0], dtype=torch.float64)
    best = maximise(gentle, [start], (-BOUND, BOUND), switchable=0)
    assert best.z.tolist() == [10, -10, 0]
    assert best.value == 7.5
    assert best.gradient == 0  # known of a start that is the top already, too
    assert best.converged


def test_every_evaluation_is_in_the_history() -> None:
    evaluations = 0

    def counted(z: Tensor) -> Iterator[Tensor]:
        nonlocal evaluations
        evaluations += 1
        yield -(z - 1).square().sum()

    best = maximise(counted, [torch.zeros_like(BOUND)], (-BOUND, BOUND), switchable=2)
    # But for the last, of the polished optimum that is no better than the one there was.
    assert evaluations - 1 <= len(best.history) <= evaluations
