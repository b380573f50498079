"""Random networks at every number there is: answers stay answers, and the network stays as it was.

Each model is fitted on odd data, and asked about rows from zero over denormals to the largest
number of its dtype, infinities and NaN, all in one batch. What has to come out is on the page
docs/numbers.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rgpr
from references import unit_variance
from rgpr.answers.probabilities import far
from rgpr.residual.variance import SHARE

from .cases import Case, Untouched, random_case, told, watched

Tally = Callable[..., None]
LINKS = ("probit", "mc", "bridge")


def magnitudes(dtype: torch.dtype) -> list[float]:
    """Numbers from the smallest to the largest of a dtype, and those that are no numbers."""
    info = torch.finfo(dtype)
    inside = [10.0**k for k in (-30, -20, -10, -5, -2, 0, 2, 4, 8, 12, 16, 20, 25, 30, 36, 100)]
    edges = [0.0, info.smallest_normal / 4, info.smallest_normal, info.max / 3, info.max]
    return [*edges, *(v for v in inside if v < info.max), torch.inf, -torch.inf, torch.nan]


def extreme_rows(case: Case) -> Tensor:
    """Each magnitude in all entries, in one entry, with random signs, and as a factor."""
    ordinary = case.inputs(4, seed=7)
    shape = ordinary.shape[1:]
    rows = [*ordinary]
    generator = torch.Generator().manual_seed(case.seed)
    for value in magnitudes(case.dtype):
        number = torch.tensor(value, dtype=torch.float64).to(case.dtype)
        signs = torch.randn(shape, generator=generator, dtype=torch.float64).sign().to(case.dtype)
        one = ordinary[0].clone()
        one.flatten()[0] = number
        rows += [number.expand(shape), number * signs, one, ordinary[1] * number]
    return torch.stack(rows)


class Expected:
    """What is known about rows without asking a model: in float64, and by hooks of our own."""

    def __init__(self, case: Case, model: rgpr.RGPR, x: Tensor) -> None:
        self.nan = x.flatten(1).isnan().any(1)
        self.infinite = x.flatten(1).isinf().any(1) & ~self.nan
        finite = ~(self.nan | self.infinite)
        training = _as_measured(case.inputs(2 if case.data == "two examples" else 60))
        u = unit_variance(x.double().nan_to_num(), training)
        self.away = torch.where(finite, u, torch.inf)
        self.mean, good = watched(model, torch.where(_column(finite, x), x, 0.0))
        self.overflowed = finite & ~good
        # A network that overflows although the input is near is broken, and may show that. Twice as
        # far is plainly far, whatever rounding says.
        self.may_be_broken = self.overflowed & (self.away < 2 * far(case.dtype))


def _column(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (x.dim() - 1))


def _as_measured(training: Tensor) -> Tensor:
    """The training data, with features constant that vary by no more than rounding."""
    flat = training.flatten(1).double()
    spread = flat.std(0, correction=0)
    rounding = 4 * torch.finfo(torch.float32).eps * flat.mean(0).abs()
    return torch.where(spread <= rounding, flat.mean(0), flat)


def check_probabilities(case: Case, p: Tensor, expected: Expected) -> None:
    assert p.dtype == case.dtype
    assert bool(p[expected.nan].isnan().all()), "a row with a NaN has another answer"
    rows = p[~(expected.nan | expected.may_be_broken)].double()
    assert bool(rows.isfinite().all()), "an answer is not finite"
    assert float(rows.min()) >= 0
    assert float(rows.max()) <= 1
    info = torch.finfo(case.dtype)
    if case.likelihood == "classification":
        # What torch's own softmax of so many classes is off by, and half of the smallest number.
        slack = max((4 + case.classes / 60) * info.eps, 1e-13)
        slack += case.classes * info.smallest_normal * info.eps
        assert float((rows.sum(1) - 1).abs().max()) <= slack, "probabilities do not sum to one"
    limit = p[expected.infinite].double()
    uniform = torch.tensor(1 / case.classes, dtype=torch.float64).to(case.dtype).double()
    assert bool(((limit - uniform).abs() <= 2 * info.eps * uniform).all()), "no limit at infinity"


def check_theorem(case: Case, model: rgpr.RGPR, x: Tensor, expected: Expected) -> int:
    """The confidence is bounded by the base's logits and the input's distance; rows within 1 %.

    The bound is that of docs/theory.md with a variance of the input alone, which the test takes in
    float64 from the training data.
    """
    rows = (expected.away < 1e300) & ~expected.overflowed
    u, mean = expected.away[rows], expected.mean[rows]
    residual = model.residual
    assert residual is not None
    weight, start = model.sigma2[0] * math.pi / 8, 0.0
    if residual.onset is not None:
        weight, start = model.sigma2[0] * SHARE / len(model.sigma2), float(residual.onset)
    # By rounding, a distance is known to a thousandth here where inputs lie far from zero.
    beyond = (0.99 * weight * u - start).clamp_min(0)
    gap = 2 * mean.abs().amax(1) / (1 + beyond).sqrt()
    bound = 1 / (1 + (case.classes - 1) * torch.exp(-gap))
    info = torch.finfo(case.dtype)
    p = model(x)
    assert isinstance(p, Tensor)
    confidence = p[rows].double().amax(1)
    assert bool((confidence <= bound + 4 * info.eps).all()), "sure although far away"
    return int((bound < 1.01 / case.classes).sum())


def check_numbers(answer: tuple[Tensor, Tensor], expected: Expected) -> None:
    mean, covariance = answer
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert bool(mean[expected.nan].isnan().all())
    assert bool(variance[expected.nan].isnan().all())
    known = ~(expected.nan | expected.may_be_broken)
    assert not bool(variance[known].isnan().any()), "a variance is NaN"
    assert float(variance[known].min()) >= 0
    assert bool((variance[expected.infinite] == torch.inf).all())
    finite = known & (variance < torch.inf).all(1)
    assert bool(mean[finite].isfinite().all()), "a mean is not finite, and its variance is"


def check_decisions(case: Case, model: rgpr.RGPR, x: Tensor, expected: Expected) -> None:
    """Scores, p-values, flags, sets and intervals, from one call."""
    found = model.predict(x, alpha=0.1, coverage=0.8, progress=False)
    known = (~(expected.nan | expected.may_be_broken)).numpy()
    nan = expected.nan.numpy()
    score, p = torch.from_numpy(found.score), found.p_value
    assert not bool(score[known].isnan().any()), "a score is NaN"
    assert not bool((score[known] == -torch.inf).any())
    assert bool((score[expected.infinite] == torch.inf).all())
    assert p is not None
    assert found.flag is not None
    assert found.flag[nan].all()
    assert bool(((p[known] >= 1 / 41 - 1e-12) & (p[known] <= 1)).all())
    if found.set is not None:
        assert found.set[known].any(1).all(), "a set is empty"
        assert found.set[expected.infinite.numpy()].all(), "a set at infinity lacks a class"
    if found.interval is not None:
        low, high = found.interval
        assert not (low[known] > high[known]).any()
    model.explain(x)
    variance = model.variance(x)
    assert float(variance[~expected.nan & ~expected.may_be_broken].min()) >= 0


def check_extremes(case: Case, tally: Tally) -> None:
    untouched = Untouched(case.network)
    model = case.model()
    x = extreme_rows(case)
    before = x.clone()
    expected = Expected(case, model, x)
    with torch.no_grad():
        if case.likelihood == "regression":
            answer = model(x)
            assert isinstance(answer, tuple)
            check_numbers(answer, expected)
        for link in LINKS if case.likelihood == "classification" else LINKS[:2]:
            if case.likelihood == "regression" or (link == "bridge" and case.outputs > 100):
                continue
            samples = 2 * case.classes if case.classes <= 10 else 3
            p = model(x, link_approx=link, n_samples=samples)
            assert isinstance(p, Tensor)
            check_probabilities(case, p, expected)
            tally("predictions checked at extreme inputs", len(x))
        if case.likelihood != "regression":
            near = check_theorem(case, model, x, expected)
            tally("rows where the theorem asks for 1/C within 1 %", near)
        model.calibrate(case.inputs(40, seed=3), case.targets(40), progress=False)
        check_decisions(case, model, x, expected)
    untouched.check()
    assert torch.equal(x.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0)), "the input changed"
    tally("random networks fitted and driven to extremes")
    tally("rows on which the network itself overflowed", int(expected.overflowed.sum()))


def test_every_number_has_an_answer(amount: Callable[[int, int], int], tally: Tally) -> None:
    for seed in range(amount(40, 1500)):
        case = random_case(seed)
        with told(case):
            check_extremes(case, tally)


def test_one_example_is_refused(amount: Callable[[int, int], int], tally: Tally) -> None:
    for seed in range(amount(8, 300)):
        case = random_case(seed, base="map")
        untouched = Untouched(case.network)
        model = rgpr.RGPR(case.network, likelihood=case.likelihood, residual=case.residual)
        with told(case), pytest.raises(ValueError, match="fewer than two inputs"):
            model.fit([case.inputs(1)], progress=False)
        untouched.check()
        tally("fits on a single example refused")


def test_a_nan_is_refused_where_asked_for(amount: Callable[[int, int], int], tally: Tally) -> None:
    for seed in range(amount(8, 300)):
        case = random_case(seed)
        with told(case):
            model, untouched = case.model(nan="raise"), Untouched(case.network)
            x = extreme_rows(case)
            row = int(x.flatten(1).isnan().any(1).nonzero()[0])
            for call in (model, model.score, model.variance):
                with pytest.raises(ValueError, match=f"row {row} of the input holds a NaN"):
                    call(x)
            with torch.no_grad():
                model(x[:row])
            untouched.check()
        tally("batches with a NaN refused", 3)


def test_training_data_that_are_not_finite_are_refused(
    amount: Callable[[int, int], int], tally: Tally
) -> None:
    for seed, value in itertools.product(range(amount(6, 100)), (torch.inf, torch.nan)):
        case = random_case(seed, data="ordinary", base="map")
        x = case.inputs(20)
        x[11].flatten()[-1] = value
        model = rgpr.RGPR(case.network, likelihood=case.likelihood)
        with told(case), pytest.raises(ValueError, match="batch 1 holds values that"):
            model.fit([(x[:10], None), (x[10:], None)], progress=False)
        tally("fits on infinities or NaN refused")
