"""Many streams at once are what a monitor does to each, and the small version of the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from rgpr.audit.monitor.martingale import Martingale
from rgpr.audit.monitor.ranks import Bins
from rgpr_paper import streams
from rgpr_paper.experiments import monitor
from rgpr_paper.section import Table
from rgpr_paper.units import read_units


def test_online_ranks_by_counting() -> None:
    values = np.random.default_rng(0).standard_normal((3, 1300)).round(1)
    placed = (10 * (values - values.min())).round().astype(np.int64)
    larger, (higher, same) = streams.online(values), streams.online_bins(placed, placed.max() + 1)
    for row in range(3):
        for place in range(0, 1300, 7):
            before = values[row, :place]
            assert larger[row, place] == (before > values[row, place]).sum()
            assert same[row, place] == (before == values[row, place]).sum()
    np.testing.assert_array_equal(higher, larger)


@pytest.mark.parametrize("m", [30, 3000])
def test_binned_streams_are_those_of_a_monitor(m: int) -> None:
    """The same p-values from the same random numbers, and the same capital."""
    generator = np.random.default_rng(1)
    references = generator.standard_normal((2, m))
    stream = streams.scores(generator, (2, 1200), 700, 1.0)
    p = streams.p_values(np.random.default_rng(7), references, stream, "binned", bins=64)
    random = np.random.default_rng(7).random(stream.shape)
    for row in range(2):
        made = Bins.of(references[row], 64, generator)
        pairs = np.stack([random[row], random[row]], 1)
        np.testing.assert_allclose(p[row], made.p_values(stream[row], pairs), rtol=1e-12)
    martingale = Martingale(np.full(2, math.log(100)))
    path = martingale.update(p.T)
    found = streams.capital(p)
    np.testing.assert_allclose(found, path.T, rtol=1e-9)
    np.testing.assert_array_equal(streams.first_above(found, math.log(100)), martingale.when)


def test_exact_and_fixed_ranks_by_counting() -> None:
    generator = np.random.default_rng(2)
    references, stream = generator.standard_normal((1, 40)), generator.standard_normal((1, 90))
    random = np.random.default_rng(3).random((1, 90))[0]
    exact, fixed = (
        streams.p_values(np.random.default_rng(3), references, stream, kind)[0]
        for kind in ("exact", "fixed")
    )
    for t in range(90):
        above = (references > stream[0, t]).sum()
        earlier = (stream[0, :t] > stream[0, t]).sum()
        assert exact[t] == pytest.approx((above + earlier + 1 - random[t]) / (41 + t))
        assert fixed[t] == pytest.approx((above + 1 - random[t]) / 41)


def test_the_other_tests() -> None:
    from scipy.stats import ks_2samp

    generator = np.random.default_rng(4)
    references, stream = generator.standard_normal((2, 50)), generator.standard_normal((2, 200))
    found = streams.sliding_ks(references, stream, 100, 10)
    assert found.shape == (2, 11)
    expected = ks_2samp(references[1], stream[1, 20:120]).statistic
    assert found[1, 2] == pytest.approx(expected, abs=1e-6)
    sums = streams.cusum(references, stream)
    z = (stream[0] - references[0].mean()) / references[0].std(ddof=1) - 0.5
    now = 0.0
    for t in range(200):
        now = max(0.0, now + z[t])
        assert sums[0, t] == pytest.approx(now)


def test_small_version(run_small: Callable[[Iterable[str]], Path]) -> None:
    folder = run_small(["monitor"]) / "monitor"
    units = {unit.name: unit for unit in read_units(folder)}
    assert len(units) == 10
    shares = {name: u.result["shares"]["0.1"][-1] for name, u in units.items() if "false" in name}
    assert all(share <= 0.1 for name, share in shares.items() if "fixed" not in name)
    section = monitor.render(folder)
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert [len(table.rows) for table in tables] == [6, 2, 6, 6]
    assert section.claims[0].holds
    assert (folder / "monitor.png").exists()
