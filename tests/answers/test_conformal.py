"""The finite-sample promises, by simulation: false alarms, discoveries, coverage."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rgpr.answers.conformal import (
    _count_below,
    class_scores,
    false_discoveries,
    inside,
    p_values,
    quantile,
    references_for,
)

SIZES = (20, 50, 200, 1000)
REPETITIONS = 1000


def noise(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(-6, 6))
def test_p_values_by_counting(references: list[int], score: int) -> None:
    ordered = torch.tensor(sorted(references), dtype=torch.float64)
    found = p_values(torch.tensor([float(score), math.nan, math.inf, -math.inf]), ordered)
    n = len(references)
    expected = (1 + sum(r >= score for r in references)) / (n + 1)
    assert float(found[0]) == pytest.approx(expected)
    assert bool(found[1].isnan())
    assert float(found[2]) == pytest.approx(1 / (n + 1))
    assert float(found[3]) == 1


some = st.one_of(st.integers(-5, 5).map(float), st.just(math.inf), st.just(-math.inf))


@given(st.lists(some, max_size=40), st.lists(some, min_size=1, max_size=8))
def test_graphs_count_as_torch_searches(references: list[float], values: list[float]) -> None:
    ordered = torch.tensor(sorted(references), dtype=torch.float64)
    wanted = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(_count_below(wanted, ordered), torch.searchsorted(ordered, wanted))
    assert _count_below(torch.tensor([math.nan]), ordered).tolist() == [0]


def within_binomial(hits: int, trials: int, p: float) -> bool:
    """Less than four standard deviations from what is expected."""
    return abs(hits - trials * p) <= 4 * math.sqrt(trials * p * (1 - p)) + 1


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_false_alarms_are_as_many_as_promised(n: int, alpha: float) -> None:
    """The exact probability of ``p <= alpha`` is ``floor(alpha (n + 1)) / (n + 1)``."""
    table = noise(n, REPETITIONS, n + 1)
    flagged = sum(int(p_values(row[:1], row[1:].sort().values) <= alpha + 1e-12) for row in table)
    exact = math.floor(alpha * (n + 1) + 1e-9) / (n + 1)
    assert exact <= alpha
    assert within_binomial(flagged, REPETITIONS, exact)


@pytest.mark.parametrize("n", SIZES)
def test_p_values_are_uniform(n: int) -> None:
    """Every rank is as likely as any other: chi squared over the ranks, ten at a time."""
    table = noise(n + 1, 4000, n + 1)
    ranks = torch.stack([p_values(r[:1], r[1:].sort().values) for r in table])[:, 0] * (n + 1)
    bins = 10
    cells = ((ranks.round().long() - 1) * bins // (n + 1)).clamp(max=bins - 1)
    sizes = torch.bincount(torch.arange(n + 1) * bins // (n + 1), minlength=bins).double()
    expected = 4000 * sizes / (n + 1)
    statistic = float(((torch.bincount(cells, minlength=bins) - expected) ** 2 / expected).sum())
    assert statistic < 30  # the 99.95 % quantile with nine degrees of freedom


def test_how_many_references_an_alpha_needs() -> None:
    assert [references_for(a) for a in (0.5, 0.1, 0.05, 0.01)] == [1, 9, 19, 99]
    # The smallest p-value of n references is 1 / (n + 1), whatever its rounding.
    assert [references_for(1 / k) for k in range(2, 500)] == list(range(1, 499))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_false_discoveries_stay_below_their_rate(n: int, rate: float) -> None:
    """Half of a batch of 40 is strange; all share the references, as they do in use."""
    shares = []
    for repetition in range(REPETITIONS // 2):
        drawn = noise(7919 * n + repetition, n + 40)
        scores = drawn[:40] + 4 * (torch.arange(40) >= 20)
        flagged = false_discoveries(p_values(scores, drawn[40:].sort().values), rate)
        shares.append(int(flagged[:20].sum()) / max(1, int(flagged.sum())))
    mean, spread = torch.tensor(shares).mean(), torch.tensor(shares).std()
    # Half of the batch is like the data, so the promise is rate / 2.
    assert float(mean) <= rate / 2 + 4 * float(spread) / math.sqrt(len(shares))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 99), st.integers(0, 5))
def test_false_discoveries_by_exact_arithmetic(ranks: list[int], rate: int, unknown: int) -> None:
    """P-values lie on the line often, and inputs without one are not counted."""
    p = torch.tensor([rank / 50 for rank in ranks] + [math.nan] * unknown).double()
    found = false_discoveries(p, rate / 100)
    n, ordered = len(ranks), sorted(ranks)
    passing = [
        r for i, r in enumerate(ordered, 1) if Fraction(r, 50) <= Fraction(rate * i, 100 * n)
    ]
    most = max(passing, default=0)
    assert found.tolist() == [rank <= most for rank in ranks] + [False] * unknown


def test_benjamini_and_hochberg_by_hand() -> None:
    p = torch.tensor([0.01, 0.9, 0.03, 0.02, 0.5])
    assert false_discoveries(p, 0.1).tolist() == [True, False, True, True, False]
    assert false_discoveries(p, 0.04).tolist() == [False] * 5
    assert false_discoveries(torch.tensor([]), 0.1).tolist() == []
    assert false_discoveries(torch.tensor([0.2, math.nan, 0.001]), 0.1).tolist() == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_sets_cover_as_often_as_promised(n: int, coverage: float) -> None:
    """Labels drawn from unsure probabilities, so that the promise is tight."""
    generator = torch.Generator().manual_seed(n)
    covered = 0
    for _ in range(REPETITIONS):
        logits = torch.randn(n + 1, 6, generator=generator, dtype=torch.float64)
        p = logits.softmax(1)
        y = torch.multinomial(p, 1, generator=generator)
        # What the model says is sharper than what it should be.
        s = class_scores((3 * logits).log_softmax(1))
        own = s.gather(1, y)[:, 0]
        covered += int(own[0] <= quantile(own[1:].sort().values, coverage))
    exact = min(1.0, math.ceil(coverage * (n + 1) - 1e-9) / (n + 1))
    assert exact >= coverage
    assert within_binomial(covered, REPETITIONS, exact)


def test_the_quantile_is_the_rank_of_exact_arithmetic() -> None:
    """``ceil(c (n + 1))`` of fractions: 0.55 * 100 is above 55 in floating point."""
    for n in (*range(1, 41), 99, 199, 999):
        scores = torch.arange(1, n + 1).double()
        for percent in range(1, 100):
            rank = math.ceil(Fraction(percent, 100) * (n + 1))
            found = float(quantile(scores, percent / 100))
            if rank > n:
                assert found == math.inf
            else:
                # Room for rounding, and less than the way to the next score.
                assert rank < found < rank + 0.02


def test_too_few_references_promise_everything() -> None:
    assert quantile(torch.tensor([1.0, 2.0]), 0.9) == math.inf
    assert quantile(torch.tensor([1.0, 2.0]), 0.5) == pytest.approx(2.0, abs=1e-4)


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_the_score_of_classes_is_smallest_at_the_uniform_distribution(seed: int, C: int) -> None:
    """So that far away, where all classes have 1/C, every class is in every set."""
    log_p = noise(seed, 10, C).log_softmax(1)
    uniform = torch.full((1, C), -math.log(C), dtype=torch.float64)
    assert bool((class_scores(log_p) >= class_scores(uniform)[0, 0] - 1e-12).all())
    top = log_p.argmax(1, keepdim=True)
    assert torch.equal(class_scores(log_p).argmin(1, keepdim=True), top)


def test_scores_and_sets_are_along_the_last_axis() -> None:
    """Each of several labels is a distribution of its own over there and not."""
    log_p = noise(0, 7, 5, 2).log_softmax(-1)
    bound = torch.tensor(0.3).double()
    for row in range(7):
        for label in range(5):
            own = log_p[row, label]
            assert torch.equal(class_scores(log_p)[row, label], class_scores(own))
            assert torch.equal(inside(log_p, bound)[row, label], inside(own, bound))
