"""Where the search looks: its units, its starts, and how it stays within a budget."""

from __future__ import annotations

import math

import pytest
import torch

from rgpr.answers.examples import Parameters
from rgpr.likelihoods import likelihood_named
from rgpr.tuning.budget import _within, largest_weight
from rgpr.tuning.objectives import Data
from rgpr.tuning.optimize import Optimum
from rgpr.tuning.options import Options
from rgpr.tuning.space import INPUT_FLOOR, Space, search_space

ONE = torch.ones((), dtype=torch.float64)


def space(layers: int, *, everything: bool = True) -> Space:
    typical = torch.linspace(0.1, 30, layers, dtype=torch.float64)
    return Space(typical, None if everything else ONE, ONE, 2.5 if everything else None)


@pytest.mark.parametrize("everything", [True, False])
def test_points_and_parameters_are_inverse_to_each_other(everything: bool) -> None:
    where = space(3, everything=everything)
    z = torch.randn(5 if everything else 3, dtype=torch.float64)
    torch.testing.assert_close(where.point(where.parameters(z)), z)
    # The unit of a scale is one over its typical value, so zero is a typical variance of one.
    assert (where.parameters(0 * z).sigma2 * where.typical).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(("layers", "alone"), [(1, 0), (2, 2), (16, 16), (17, 0)])
def test_each_layer_alone_is_a_start(layers: int, alone: int) -> None:
    where = space(layers)
    now = where.parameters(torch.randn(layers + 2, dtype=torch.float64))
    present, *others = where.starts(now)
    torch.testing.assert_close(present, where.point(now))
    assert len(others) == 9 + alone
    shared, single = others[:9], others[9:]
    powers = [float(start[0]) / math.log(10) for start in shared]
    assert powers == pytest.approx(list(range(-5, 4)))
    for index, start in enumerate(single):
        sigma2 = where.parameters(start).sigma2 * where.typical
        assert float(sigma2[index]) == pytest.approx(1)
        assert (sigma2 < 1e-4).sum() == layers - 1
    for start in others:  # the temperature and the noise stay as they are
        torch.testing.assert_close(start[layers:], present[layers:])


def test_units_come_from_the_data_and_from_outliers_where_the_data_show_nothing() -> None:
    u = torch.stack([torch.linspace(0, 1, 101), torch.zeros(101), torch.zeros(101)], 1).double()
    outliers = torch.tensor([[9.0, 7.0, 0.0]] * 101).double()
    data = Data(u, torch.zeros(101, 3), torch.arange(101) % 3, (101, 101), (101, 101), outliers)
    now = Parameters(torch.ones(3).double(), ONE, 0 * ONE)
    found, _ = search_space(data, now, likelihood_named("classification"), Options())
    assert found.typical.tolist() == pytest.approx([0.95, 7.0, 1.0])


def test_what_costs_too_much_is_halved_and_the_input_keeps_its_floor() -> None:
    where = space(2, everything=False)
    tuned = Parameters(torch.tensor([3.0, 5.0]).double(), ONE, ONE)
    floor = INPUT_FLOOR / float(where.typical[0])
    within = _within(lambda p: float(p.sigma2[1]), 1e-9, where, tuned)
    assert float(within.sigma2[0]) == pytest.approx(floor)
    assert 0.5e-9 <= float(within.sigma2[1]) <= 1e-9
    # Just within the budget is within it.
    assert _within(lambda p: 0.25, 0.25, where, tuned) is tuned


def test_weights_fall_by_the_root_of_ten() -> None:
    def solve(weight: float, near: Optimum | None) -> Optimum:
        return Optimum(torch.tensor([weight]), 0.0)

    weight, _, trials = largest_weight(solve, lambda o: float(o.z), 0.0, 100.0)
    assert weight == 0
    tried = [trial.weight for trial in trials]
    assert tried[:-1] == pytest.approx([100 * 10 ** (-k / 2) for k in range(13)])
    assert tried[-1] == 0
