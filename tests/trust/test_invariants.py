"""What holds for every network and every input, tried on random ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import rgpr
from rgpr._network.guards import evaluating

from .cases import Case, random_case, told, watched
from .replay import Replay

Amount = Callable[[int, int], int]
Tally = Callable[..., None]


def base_logits(model: rgpr.RGPR, x: Tensor) -> Tensor:
    """What the base's own probit puts into its softmax, ``(B, C)`` in float64."""
    with torch.no_grad(), evaluating(model.posterior) as modes, modes:
        gaussian = model.posterior(x.clone())
    return gaussian.mean.double() * (1 + math.pi / 8 * gaussian.variance.double()).rsqrt()


def near_and_far(case: Case, each: int = 12) -> Tensor:
    """Rows like the training data, and others up to a thousand times as far from its mean."""
    x = case.inputs(each, seed=5)
    mean = x.double().mean(0)
    factors = torch.tensor([1.0, 2.0, 5.0, 30.0, 1000.0]).double()
    rows = torch.cat([mean + factor * (x.double() - mean) for factor in factors])
    top = torch.finfo(case.dtype).max
    return rows.clamp(-top, top).to(case.dtype)


# -- the base ------------------------------------------------------------------------------------


def test_without_scale_the_answer_is_the_networks(amount: Amount, tally: Tally) -> None:
    """For a point estimate, the softmax or sigmoid of what the network returns, bit by bit.

    In half precision torch's own softmax of very many classes adds them up in another order than in
    float32, so a few answers differ there by one rounding.
    """
    for seed in range(amount(25, 1000)):
        case = random_case(seed, base="map")
        with told(case), torch.no_grad():
            model = case.model()
            model.sigma2 = 0.0
            x = near_and_far(case)
            outputs, rows = watched(model, x)
            outputs = outputs.to(case.dtype)
            answer = model(x)
            if case.likelihood == "classification":
                zeros = torch.zeros_like(outputs)
                logits = torch.cat([zeros, outputs], 1) if case.outputs == 1 else outputs
                expected = logits.softmax(1)
            else:
                expected = outputs.sigmoid() if case.likelihood == "multilabel" else outputs
            found = answer[0] if isinstance(answer, tuple) else answer
            if case.dtype in (torch.bfloat16, torch.float16) and case.outputs >= 100:
                info = torch.finfo(case.dtype)
                least = info.smallest_normal * info.eps
                torch.testing.assert_close(found[rows], expected[rows], rtol=info.eps, atol=least)
            else:
                assert torch.equal(found[rows], expected[rows])
            if isinstance(answer, tuple):
                assert not bool(answer[1][rows].any())
        tally("answers without scale equal to the network's", int(rows.sum()))


def test_the_order_of_classes_is_the_bases(amount: Amount, tally: Tally) -> None:
    """With the default residual, over every base; equal logits get equal probabilities."""
    for seed in range(amount(25, 1000)):
        case = random_case(seed, likelihood="classification", residual="onset")
        if case.outputs == 1:
            continue
        with told(case), torch.no_grad():
            model, x = case.model(), near_and_far(case)
            if case.base == "map" and hasattr(case.network, "head") and case.outputs > 2:
                case.network.head.weight[:2], case.network.head.bias[:2] = 0.0, 0.3
            logits, p = base_logits(model, x), model(x)
            assert isinstance(p, Tensor)
            good = logits.isfinite().all(1) & p.isfinite().all(1)
            logits, order = logits[good].sort(1)
            p = p[good].gather(1, order).double()
            # Two exponentials of almost equal numbers are known to their last digits.
            slack = 4 * torch.finfo(case.dtype).eps * p[:, 1:]
            assert bool((p.diff(dim=1) >= -slack).all()), "classes changed their order"
            ties = logits.diff(dim=1) == 0
            assert bool((p.diff(dim=1)[ties] == 0).all()), "equal logits, unequal probabilities"
        tally("orders of classes compared with the base's", len(p))
        tally("pairs of classes with equal logits", int(ties.sum()))


# -- variance ------------------------------------------------------------------------------------


def test_the_variance_of_the_input_never_falls_on_a_ray(amount: Amount, tally: Tally) -> None:
    """From the mean of the training data outward, for both residuals, with the input's scale alone.

    Hidden layers may come nearer to their data again as an input goes away, and then the variance
    of both residuals may fall. What they promise is a bound by the input's own distance, and that
    is what grows on every ray.
    """
    for seed in range(amount(25, 1000)):
        case = random_case(seed)
        with told(case), torch.no_grad():
            model = case.model()
            scales = torch.zeros_like(model.sigma2)
            scales[0] = model.sigma2[0]
            model.sigma2 = scales
            training = case.inputs(2 if case.data == "two examples" else 60).double()
            mean, spread = training.mean(0), training.std(0, correction=0).max()
            spread = spread if float(spread) > 0 else torch.ones_like(spread)
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
            top = torch.finfo(case.dtype).max / 10
            factors = 10 * 1.5 ** torch.arange(60).double() * spread
            factors = factors[factors * direction.abs().max() + mean.abs().max() < top]
            ray = mean + factors.reshape(-1, *[1] * mean.dim()) * direction
            if not len(ray):
                continue
            v = model.variance(ray.to(case.dtype))
            assert bool((v >= 0).all())
            assert bool((v[1:] >= v[:-1]).all()), "the variance falls"
            assert float(v[-1]) > 0 or len(ray) < 5
        tally("points on rays whose variance never falls", len(ray))


def test_a_variance_is_never_negative(amount: Amount, tally: Tally) -> None:
    for seed in range(amount(25, 1000)):
        case = random_case(seed)
        with told(case), torch.no_grad():
            model, x = case.model(), near_and_far(case)
            v = model.variance(x)
            assert float(v[v.isfinite()].min()) >= 0
            if case.likelihood == "regression":
                _, variances = model(x, diagonal_output=True)
                assert float(variances[variances.isfinite()].min()) >= 0
        tally("variances checked", len(v))


# -- rows and batches ----------------------------------------------------------------------------


def answers(model: rgpr.RGPR, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        found = model._everything(x, diagonal_output=True)
        names = model._likelihood.answers
        return dict(zip((*names, "score", "p_value"), found, strict=True))


def test_a_row_does_not_depend_on_its_batch(amount: Amount, tally: Tally) -> None:
    """Alone, in batches of several sizes, in another order, and beside rows of 1e30 and NaN."""
    for seed in range(amount(20, 700)):
        case = random_case(seed, base="temperature" if seed % 4 == 0 else "map")
        if case.outputs > 1000:
            continue
        with told(case):
            tally("answers compared with those of a row alone", compare_batches(case))


def compare_batches(case: Case) -> int:
    model = case.model()
    model.calibrate(case.inputs(60, seed=3), progress=False)
    large = min(1e30, torch.finfo(case.dtype).max)
    x = torch.cat([near_and_far(case, 4), case.inputs(2, seed=8)])
    x[-2], x[-1] = large, torch.nan
    replay = Replay(case.network, x)
    try:
        alone = []
        for row in range(len(x)):
            replay.rows(torch.tensor([row]))
            alone.append(answers(model, x[row : row + 1]))
        expected = {name: torch.cat([each[name] for each in alone]) for name in alone[0]}
        generator = torch.Generator().manual_seed(case.seed)
        compared = 0
        for size in (2, 7, len(x)):
            index = torch.randperm(len(x), generator=generator)[:size]
            index = torch.cat([index[:-1], torch.tensor([len(x) - 2])])  # beside the large row
            for rows in (index, torch.cat([index[:-1], torch.tensor([len(x) - 1])])):
                replay.rows(rows)
                for name, found in answers(model, x[rows]).items():
                    check_equal(case, model, name, found, expected, rows)
                compared += len(rows)
        return compared
    finally:
        replay.close()


def check_equal(
    case: Case,
    model: rgpr.RGPR,
    name: str,
    found: Tensor,
    expected: dict[str, Tensor],
    rows: Tensor,
) -> None:
    known = expected[name][rows]
    slack = 1e-12 if case.dtype == torch.float64 else 1e-6
    if name == "p_value":
        # Scores beside a reference may count it or not.
        score, references = expected["score"][rows], model._reference_scores()
        beside = (score[:, None] - 1e-5 - references).abs().amin(1) < 3 * slack
        found, known = found[~beside], known[~beside]
    relative = slack
    if name == "covariance":
        # A difference of cubes, which start at the onset.
        slack = relative = 10 * slack * (1 + float(model.residual.unit))  # type: ignore[union-attr]
    if name == "probabilities" and case.dtype in (torch.bfloat16, torch.float16):
        slack = relative = torch.finfo(case.dtype).eps  # of a single rounding of the answer
    torch.testing.assert_close(
        found, known, atol=slack, rtol=relative, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def test_the_same_call_twice_gives_the_same_bits(amount: Amount, tally: Tally) -> None:
    for seed in range(amount(25, 1000)):
        case = random_case(seed)
        with told(case), torch.no_grad():
            model, x = case.model(), near_and_far(case)
            model.calibrate(case.inputs(40, seed=3), progress=False)
            samples = 5 if case.outputs > 100 else 20

            def call(model: rgpr.RGPR = model, x: Tensor = x, n: int = samples) -> list[Tensor]:
                source = torch.Generator().manual_seed(1)
                drawn = model(x, link_approx="mc", n_samples=n, generator=source)
                drawn = drawn if isinstance(drawn, tuple) else (drawn,)
                return [*answers(model, x).values(), *drawn, model.variance(x)]

            for first, second in zip(call(), call(), strict=True):
                assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
        tally("calls repeated with the same bits")


# -- continuity ----------------------------------------------------------------------------------


def largest_step(f: Callable[[Tensor], Tensor], levels: int) -> float:
    """The change of ``f`` over the shortest step, where it is largest, on the way from 0 to 1.

    Every level looks closer at the place where the level before saw the largest change, so a jump
    stays as large as it is and everything else becomes small. Changes are relative to the values
    there, because a variance of a million rounds by more than one of one.
    """
    low, high = 0.0, 1.0
    for _ in range(levels):
        t = torch.linspace(low, high, 17, dtype=torch.float64)
        values = f(t)
        steps = (values.diff(dim=0) / (1 + values[1:].abs())).abs().amax(1)
        place = int(steps.argmax())
        low, high = float(t[place]), float(t[place + 1])
    return float(steps.max())


def test_nothing_jumps(amount: Amount, tally: Tally) -> None:
    """Probabilities, scores and variances, across decision boundaries, classes and the onset."""
    for seed in range(amount(25, 1000)):
        case = random_case(seed, dtype=torch.float64, data="ordinary")
        if case.outputs > 100 or case.base == "dropout":
            continue
        with told(case), torch.no_grad():
            model = case.model()
            ends = case.inputs(2, seed=9) * torch.tensor([1.0, 4.0]).double().reshape(
                2, *[1] * len(case.architecture.shape)
            )

            def f(t: Tensor, model: rgpr.RGPR = model, ends: Tensor = ends) -> Tensor:
                t = t.reshape(-1, *[1] * (ends.dim() - 1))
                found = model._everything(ends[0] + t * (ends[1] - ends[0]), diagonal_output=True)
                parts = [part.reshape(len(t), -1) for part in found[: len(found) - 1]]
                variance = model.variance(ends[0] + t * (ends[1] - ends[0]))
                return torch.cat([*parts, found[-1][:, None], variance.log1p()[:, None]], 1)

            step = largest_step(f, 11)
            assert step <= 1e-6, f"a jump of {step:.2g}"
        tally("paths searched for jumps")
