"""What the promise rests on: uniform, independent p-values, and bets that are fair."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from rgpr.audit.monitor.martingale import BETS, Martingale, advance, bets, start, waking
from rgpr.audit.monitor.ranks import Bins, fixed_p_values, ranks_of_edges

M, T = 3, 3


def p_of(
    references: NDArray[np.float64], stream: NDArray[np.float64], bins: int, seed: int
) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    return Bins.of(references, bins, generator).p_values(stream, generator.random((len(stream), 2)))


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [2, 3, 100])
def test_p_values_are_uniform_and_independent_exactly(bins: int) -> None:
    """Every order of references and inputs once: each box of p-values is as likely as it is large.

    Within a box p-values are uniform and independent by their random numbers, so the joint density
    is one everywhere, for any number of bins.
    """
    boxes: Counter[tuple[tuple[Fraction, Fraction], ...]] = Counter()
    for order in itertools.permutations(range(M + T)):
        scores = np.array(order, dtype=np.float64)
        ends = []
        for random in (1.0, 0.0):
            made = Bins.of(scores[:M], bins, np.random.default_rng(0))
            p = made.p_values(scores[M:], np.full((T, 2), random))
            ends.append([Fraction(float(x)).limit_denominator(100) for x in p])
        boxes[tuple(zip(*ends, strict=True))] += 1
    total = math.factorial(M + T)
    volumes = {box: math.prod(high - low for low, high in box) for box in boxes}
    assert sum(volumes.values()) == 1
    for box, count in boxes.items():
        assert Fraction(count, total) == volumes[box]


@pytest.mark.parametrize(("m", "bins"), [(3, 8), (40, 8), (40, 1024)])
@pytest.mark.parametrize("ties", [False, True])
def test_p_values_look_uniform(m: int, bins: int, ties: bool) -> None:
    """Also where scores have many ties: in tenths of the unit interval, and next to each other."""
    generator = np.random.default_rng(1)
    found = []
    for seed in range(300):
        scores = generator.standard_normal(m + 30)
        found.append(p_of(*np.split(scores.round() if ties else scores, [m]), bins, seed))
    p = np.stack(found)
    counts = np.histogram(p, 10, (0, 1))[0]
    assert ((counts - p.size / 10) ** 2 / (p.size / 10)).sum() < 27.9  # 99.9 % of chi2, 9 degrees
    for lag in (1, 5):
        assert abs(np.corrcoef(p[:, lag:].ravel(), p[:, :-lag].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(p.mean(1), np.arange(len(p)))[0, 1]) < 0.2
    # The mean over a stream varies as that of independent uniform numbers does.
    assert p.mean(1).var() == pytest.approx(1 / 12 / 30, rel=0.3)


def test_against_the_references_alone_p_values_hang_together() -> None:
    generator = np.random.default_rng(2)
    means = []
    for _ in range(600):
        references, stream = np.split(generator.standard_normal(40 + 30), [40])
        above = (references > stream[:, None]).sum(1)
        means.append(fixed_p_values(above, 40, generator.random(30)).mean())
    assert np.var(means) > 1.5 / 12 / 30


def test_p_values_by_counting() -> None:
    """With a bin for each gap: the smoothed conformal p-value, earlier inputs of a gap tied."""
    generator = np.random.default_rng(3)
    scores = generator.standard_normal(50 + 400)
    references, stream = np.split(scores, [50])
    random = generator.random((400, 2))
    found = Bins.of(references, 100, generator).p_values(stream, random)
    gaps = np.searchsorted(np.sort(references), stream)
    for t in range(400):
        larger = (references > stream[t]).sum() + (gaps[:t] > gaps[t]).sum()
        equal = 1 + (gaps[:t] == gaps[t]).sum()
        assert found[t] == pytest.approx((larger + (1 - random[t, 1]) * equal) / (50 + t + 1))


def test_a_stranger_input_has_a_smaller_p_value_and_a_nan_the_smallest() -> None:
    references = np.arange(100.0)
    p = p_of(references, np.array([-5.0, 50.5, 1e9]), 1024, 0)
    assert p[0] > p[1] > p[2]
    assert p_of(references, np.array([math.nan]), 1024, 0)[0] < 1 / 101
    assert p_of(references, np.array([math.inf]), 1024, 0)[0] < 1 / 101


@pytest.mark.parametrize("m", [1, 7, 8, 9, 100, 1023, 1024, 1025, 100_000])
def test_ranks_of_edges(m: int) -> None:
    ranks = ranks_of_edges(m, 1024)
    assert ranks[0] >= 1
    assert ranks[-1] <= m
    assert (np.diff(ranks) > 0).all()
    assert len(ranks) < 1024
    assert m in ranks
    made = Bins.of(np.zeros(m), 1024, np.random.default_rng(0))
    assert made.counts.sum() == m + 1
    assert made.counts.min() >= 1


# -- bets ----------------------------------------------------------------------------------------


def test_every_bet_integrates_to_one() -> None:
    from scipy.integrate import quad

    for k in range(len(BETS)):
        halves = [
            quad(lambda p, k=k: float(bets(np.array([p]))[k, 0]), *ends, limit=500)[0]
            for ends in ((0, 0.5), (0.5, 1))
        ]
        assert sum(halves) == pytest.approx(1, abs=1e-5)


def test_bets_are_densities_of_beta() -> None:
    from scipy.stats import beta

    p = np.linspace(0.001, 0.999, 99)
    for found, exponents in zip(bets(p), BETS, strict=True):
        np.testing.assert_allclose(found, beta.pdf(p, *exponents), rtol=1e-10)
    assert np.isfinite(bets(np.array([0.0, 1.0]))).all()


def test_waking_and_jumping_leave_the_capital_as_it_is() -> None:
    """So one step multiplies it by a mean of densities, whose expectation is one."""
    generator = np.random.default_rng(0)
    shares = generator.dirichlet(np.ones(1 + len(BETS)), 5).T
    for t in (1, 10, 10**6):
        awake = waking(np.full(5, t))
        assert ((awake > 0) & (awake < 1)).all()
        after, grown = advance(shares, np.ones((len(BETS), 5)), awake)
        np.testing.assert_allclose(grown, 0, atol=1e-12)
        np.testing.assert_allclose(after.sum(0), 1)
        assert (after > 0).all()
        densities = generator.exponential(size=(len(BETS), 5))
        moved = after[1:]
        np.testing.assert_allclose(
            np.exp(advance(shares, densities, awake)[1]), after[0] + (moved * densities).sum(0)
        )


def test_most_capital_still_sleeps_after_a_long_quiet_time() -> None:
    asleep = np.cumprod(1 - waking(np.arange(1, 1_000_001)))
    assert asleep[-1] == pytest.approx(math.log(10) / math.log(1_000_010))
    assert asleep[-1] > 0.15


def test_ville() -> None:
    """Of 2000 streams of 500 at most a tenth ever has ten times its capital."""
    generator = np.random.default_rng(0)
    martingale = Martingale(np.full(2000, math.log(10)))
    path = martingale.update(generator.random((500, 2000)))
    share = (path.max(0) >= math.log(10)).mean()
    assert 0.01 < share < 0.1
    np.testing.assert_array_equal(path.max(0) >= math.log(10), martingale.when > 0)
    np.testing.assert_array_equal(np.maximum(path.max(0), 0), martingale.peak)
    # Its expectation is one. Later on its tail is so heavy that no mean of a sample shows it.
    assert np.exp(path[0]).mean() == pytest.approx(1, abs=0.01)


def test_since_when() -> None:
    generator = np.random.default_rng(0)
    p = generator.random((600, 50))
    p[300:] **= 3  # too many small ones
    martingale = Martingale(np.full(50, math.log(1000)))
    martingale.update(p)
    assert (martingale.when > 300).all()
    assert (martingale.since <= martingale.when).all()
    assert abs(np.median(martingale.since) - 301) < 8


def test_nothing_overflows() -> None:
    martingale = Martingale(np.full(2, math.log(100)))
    martingale.update(np.full((3000, 2), [1e-12, 1 - 1e-12]))
    assert np.isfinite(martingale.log).all()
    assert (martingale.log > 1000).all()
    assert np.isfinite(martingale.shares).all()
    martingale.update(np.full((3000, 2), [0.5, 0.5]))
    assert np.isfinite(martingale.log).all()
    assert (martingale.shares > 0).all()


def test_streams_do_not_touch_each_other() -> None:
    p = np.random.default_rng(0).random((200, 3)) ** 2
    together = Martingale(np.full(3, math.log(5)))
    together.update(p)
    alone = Martingale(np.full(3, math.log(5)))
    alone.update(p[:, :1], slice(0, 1))
    assert alone.count.tolist() == [200, 0, 0]
    for name in ("log", "peak", "when", "since"):
        assert getattr(alone, name)[0] == pytest.approx(getattr(together, name)[0], rel=1e-9)
    assert start(3).sum(0).tolist() == [1, 1, 1]
