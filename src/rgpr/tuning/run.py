"""Tuning from loaders to a result; see :meth:`rgpr.RGPR.tune`."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._network.checks import check_n_samples, one_of
from .._network.processes import active
from ..answers.outputs import Outputs, Parameters, collect
from ..metrics import accuracy, confidence, ece, nll
from ..noise import NoiseLoader, like_data
from .budget import LARGEST_WEIGHT, METRICS, Trial, largest_weight
from .objectives.likelihood import log_likelihood
from .objectives.marginal import collect_matrices
from .objectives.outliers import ignorance
from .optimize import Objective, Optimum, maximise
from .result import TuningResult

if TYPE_CHECKING:
    from ..model import RGPR

__all__ = ["OBJECTIVES", "tune"]

OBJECTIVES = ("likelihood", "ood", "marginal-likelihood")
# Shared scales of all layers that are looked at first, as powers of ten of the typical variance.
_SCALES = range(-5, 4)
# Logarithms beyond this are as good as zero or infinity: 1e-10 and 1e10 times the typical value.
_BOUND = 23.0
# The input carries the guarantee: it keeps a variance of at least this much in typical units (at
# the 95 % quantile of the data), which no prediction notices and which is a thousand times more at
# ten times the distance.
_INPUT_FLOOR = 1e-3
# Added variance can be traded for a lower temperature without end; so far and no further.
_TEMPERATURES = (0.05, 20.0)


@dataclass(frozen=True)
class _Space:
    """Which parameters are searched, and in which units.

    A point is ``(log sigma2 typical, log T, log noise / unit)``, what is not searched left out.
    """

    typical: Tensor
    temperature: Tensor | None
    noise: Tensor
    noise_unit: float | None

    def parameters(self, z: Tensor) -> Parameters:
        count = len(self.typical)
        sigma2 = z[:count].exp() / self.typical
        rest = list(z[count:])
        temperature = rest.pop(0).exp() if self.temperature is None else self.temperature
        noise = rest.pop(0).exp() * self.noise_unit if self.noise_unit else self.noise
        return Parameters(sigma2, temperature, noise)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest point."""
        rest = [] if self.temperature is not None else [[math.log(t) for t in _TEMPERATURES]]
        rest += [[-_BOUND, _BOUND]] if self.noise_unit else []
        scales = [[-_BOUND, _BOUND] for _ in self.typical]
        scales[0][0] = math.log(_INPUT_FLOOR)
        low, high = self.typical.new_tensor([*scales, *rest]).unbind(1)
        return low, high

    def point(self, parameters: Parameters) -> Tensor:
        """The inverse of :meth:`parameters`."""
        z = [*(parameters.sigma2 * self.typical).clamp_min(1e-300).log()]
        if self.temperature is None:
            z.append(parameters.temperature.log())
        if self.noise_unit:
            z.append((parameters.noise / self.noise_unit).log())
        return torch.stack(z)

    def starts(self, now: Parameters) -> list[Tensor]:
        """The present parameters, all layers on one scale, and each layer alone."""
        count = len(self.typical)
        present, tail = self.point(now).tensor_split([count])
        scales = [torch.full_like(present, power * math.log(10)) for power in _SCALES]
        for index in range(count if 1 < count <= 16 else 0):
            alone = torch.full_like(present, -_BOUND / 2)
            alone[index] = 0.0
            scales.append(alone)
        return [torch.cat([z, tail]) for z in (present, *scales)]


def tune(
    model: RGPR,
    val_loader: Iterable[Any],
    *,
    objective: str,
    ood: Iterable[Any] | None,
    ood_weight: float | None,
    link_approx: str,
    n_samples: int,
    temperature: bool,
    max_nll_increase: float | None,
    max_ece_increase: float | None,
    noise: float | None,
    max_examples: int | None,
    seed: int,
    progress: bool,
) -> TuningResult:
    """Find the parameters, set them on the model, and report."""
    started = time.perf_counter()
    residual = model._fitted()
    if residual.onset is not None:
        raise ValueError(
            "the default residual has no scales to tune: call model.calibrate(val_loader), which "
            "sets how it answers from held-out data. The paper's objectives choose the scales of "
            "RGPR(..., residual='paper')"
        )
    limits = {"nll": max_nll_increase, "ece": max_ece_increase}
    chosen = {metric: limit for metric, limit in limits.items() if limit is not None}
    if ood_weight is None:
        ood_weight = LARGEST_WEIGHT if chosen else 0.5
    _check(
        model,
        objective,
        ood,
        ood_weight,
        link_approx,
        temperature,
        chosen,
        noise,
        max_examples,
        n_samples,
    )
    now = Parameters(
        residual.sigma2,
        model.temperature,
        residual.sigma2.new_tensor(0.0 if noise is None else noise),
    )
    if objective == "marginal-likelihood" and active():
        raise ValueError(
            "the marginal likelihood needs all examples in one process; tune in one and share "
            "model.sigma2, or use objective='likelihood'"
        )
    if objective == "marginal-likelihood":
        found = _by_evidence(model, val_loader, now, noise, progress)
    else:
        validation, outliers = _read(
            model, val_loader, ood, objective, link_approx, n_samples, max_examples, seed, progress
        )
        space, now = _space(
            model, validation.u, validation.first, validation.labels, now, temperature, noise,
            outliers,
        )  # fmt: skip
        found = _by_predictions(model, validation, outliers, space, now, ood_weight, chosen)
    tuned = found.tuned
    model.sigma2 = tuned.sigma2
    if temperature:
        model.temperature = float(tuned.temperature)
    notes = _notes(model.layers, found.space, tuned, found.trials, found.optimum.converged)
    for note in notes:
        warnings.warn(note, stacklevel=5)  # through the decorators of RGPR.tune
    return TuningResult(
        objective=objective,
        before=found.before,
        after=found.after,
        sigma2=dict(zip(model.layers, tuned.sigma2.tolist(), strict=True)),
        share=_share(model.layers, tuned.sigma2, found.at_data, found.at_outliers),
        temperature=float(tuned.temperature),
        noise=float(tuned.noise) if model.likelihood == "regression" else None,
        ood_weight=found.weight,
        metrics=found.metrics,
        trials=found.trials,
        converged=found.optimum.converged,
        history=found.optimum.history,
        examples=found.used,
        seen=found.seen,
        seconds=time.perf_counter() - started,
        warnings=notes,
    )


@dataclass(frozen=True)
class _Found:
    """What a search came to."""

    tuned: Parameters
    before: float
    after: float
    space: _Space
    optimum: Optimum
    at_data: Tensor
    used: tuple[int, int]
    seen: tuple[int, int]
    at_outliers: Tensor | None = None
    weight: float | None = None
    trials: list[Trial] = field(default_factory=list)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


def _by_evidence(
    model: RGPR, val_loader: Iterable[Any], now: Parameters, noise: float | None, progress: bool
) -> _Found:
    """The marginal likelihood of all examples together."""
    matrices = collect_matrices(
        model.posterior,
        model.layers,
        model._fitted(),
        val_loader,
        shape=model._input_shape,
        likelihood=model.likelihood,
        progress=progress,
    )
    at_data = matrices.residual.diagonal(dim1=1, dim2=2).T
    space, now = _space(model, at_data, matrices.mean, matrices.target, now, False, noise)
    optimum = maximise(
        lambda z: [matrices.evidence(space.parameters(z))],
        space.starts(now),
        *space.bounds,
        switchable=len(space.typical),
        climbs=1,
    )
    before = float(matrices.evidence(now))
    after, tuned = optimum.value, space.parameters(optimum.z)
    if after < before:
        tuned, after = now, before
    sizes = (len(matrices), 0)
    return _Found(tuned, before, after, space, optimum, at_data, sizes, sizes)


def _by_predictions(
    model: RGPR,
    validation: Outputs,
    outliers: Outputs | None,
    space: _Space,
    now: Parameters,
    ood_weight: float,
    budget: dict[str, float],
) -> _Found:
    """The mean likelihood of each example, with outliers if there are some, within a budget."""
    target, starts = validation.labels, space.starts(now)
    goal = _goal(model.likelihood, validation, outliers, space)

    def solve(weight: float, near: Optimum | None) -> Optimum:
        first = starts if near is None else [near.z, *starts]
        return maximise(goal(weight), first, *space.bounds, switchable=len(space.typical))

    weight = ood_weight if outliers is not None else None
    trials: list[Trial] = []
    if budget:
        [(metric, increase)] = budget.items()
        measure = METRICS[metric]
        base = dataclasses.replace(now, temperature=torch.ones_like(now.temperature))
        own = measure(validation.probabilities(base.without_residual()), target)

        def cost(parameters: Parameters) -> float:
            return measure(validation.probabilities(parameters), target) - own

        weight, optimum, trials = largest_weight(
            solve, lambda o: cost(space.parameters(o.z)), increase, ood_weight
        )
        tuned = _within(cost, increase, space, space.parameters(optimum.z))
    else:
        optimum = solve(weight or 0.0, None)
        tuned = space.parameters(optimum.z)
    objective = goal(weight or 0.0)
    before, after = (_total(objective(space.point(p))) for p in (now, tuned))
    if not budget and after < before:
        tuned, after = now, before
    metrics: dict[str, tuple[float, float]] = {}
    if model.likelihood == "classification":
        metrics = _metrics(validation, outliers, now, tuned)
    return _Found(
        tuned,
        before,
        after,
        space,
        optimum,
        validation.u,
        used=(len(validation), 0 if outliers is None else len(outliers)),
        seen=(validation.seen, 0 if outliers is None else outliers.seen),
        at_outliers=None if outliers is None else outliers.u,
        weight=weight,
        trials=trials,
        metrics=metrics,
    )


def _check(
    model: RGPR,
    objective: str,
    ood: Iterable[Any] | None,
    ood_weight: float,
    link_approx: str,
    temperature: bool,
    budgets: dict[str, float],
    noise: float | None,
    max_examples: int | None,
    n_samples: int,
) -> None:
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"max_examples = {max_examples} must be at least 1, or None")
    check_n_samples(n_samples)
    one_of("objective", objective, OBJECTIVES)
    one_of("link_approx", link_approx, ("probit", "mc"))
    if ood is not None and objective != "ood":
        raise ValueError(f"outliers are given, but objective='{objective}' does not use them")
    if not ood_weight >= 0:
        raise ValueError(f"ood_weight = {ood_weight} must not be negative")
    if len(budgets) > 1:
        raise ValueError("give max_nll_increase or max_ece_increase, not both")
    if budgets and objective != "ood":
        raise ValueError(
            f"a budget chooses the weight of the outliers, and objective='{objective}' has none"
        )
    if any(not limit >= 0 for limit in budgets.values()):
        raise ValueError(f"the budget {budgets} must not be negative")
    about_classes = temperature or budgets or link_approx == "mc"
    if model.likelihood == "regression" and about_classes:
        raise ValueError(
            "temperature, calibration budgets and link_approx='mc' are about class probabilities; "
            "this model is a regression"
        )
    if temperature and objective == "marginal-likelihood":
        raise ValueError(
            "the marginal likelihood is of a Gaussian process, which has no temperature; use "
            "objective='likelihood' or 'ood', or wrap the base in rgpr.posteriors.Temperature"
        )
    if noise is not None and (model.likelihood != "regression" or not noise > 0):
        raise ValueError(f"noise = {noise}: the positive variance of a regression's observations")


def _read(
    model: RGPR,
    val_loader: Iterable[Any],
    ood: Iterable[Any] | None,
    objective: str,
    link_approx: str,
    n_samples: int,
    max_examples: int | None,
    seed: int,
    progress: bool,
) -> tuple[Outputs, Outputs | None]:
    """One pass over the validation data and, for ``objective="ood"``, one over outliers."""
    generator = torch.Generator().manual_seed(seed)

    def read(loader: Iterable[Any], likelihood: str | None, stop_after: int | None) -> Outputs:
        return collect(
            model._read,
            model.posterior,
            loader,
            shape=model._input_shape,
            link_approx=link_approx,
            n_samples=n_samples,
            generator=generator,
            likelihood=likelihood,
            at_most=max_examples,
            stop_after=stop_after,
            progress=progress,
            description="rgpr tune" if likelihood else "rgpr tune, outliers",
        )

    validation = read(val_loader, model.likelihood, None)
    if objective != "ood":
        return validation, None
    if ood is None:
        ood = NoiseLoader(like_data, val_loader, seed=seed)
    # A generator may never end: as many outliers as there are examples will do.
    endless = not hasattr(ood, "__len__")
    return validation, read(ood, None, validation.seen if endless else None)


def _space(
    model: RGPR,
    u: Tensor,
    mean: Tensor,
    target: Tensor,
    now: Parameters,
    temperature: bool,
    noise: float | None,
    outliers: Outputs | None = None,
) -> tuple[_Space, Parameters]:
    """Units for every parameter from the data, and where the search stands."""
    everywhere = u if outliers is None else torch.cat([u, outliers.u])
    typical = _typical(u)
    typical = torch.where(typical > 0, typical, _typical(everywhere)).clamp(1e-30, 1e30)
    typical = torch.where(everywhere.amax(0) > 0, typical, 1.0)
    unit = None
    if model.likelihood == "regression" and noise is None:
        unit = float((target - mean).square().mean()) or 1.0
        now = Parameters(now.sigma2, now.temperature, now.noise + unit)
    return _Space(typical, None if temperature else now.temperature, now.noise, unit), now


def _typical(u: Tensor) -> Tensor:
    return u.quantile(0.95, dim=0)


def _goal(
    likelihood: str, validation: Outputs, outliers: Outputs | None, space: _Space
) -> Callable[[float], Objective]:
    """The objective for each weight of the outliers."""
    values = validation.target if likelihood == "regression" else None

    def goal(weight: float) -> Objective:
        def objective(z: Tensor) -> Iterable[Tensor]:
            parameters = space.parameters(z)
            yield from log_likelihood(validation, parameters, likelihood)
            if outliers is not None and weight > 0:
                for part in ignorance(outliers, parameters, values):
                    yield weight * part

        return objective

    return goal


def _total(parts: Iterable[Tensor]) -> float:
    return sum(float(part) for part in parts)


def _within(
    cost: Callable[[Parameters], float], increase: float, space: _Space, tuned: Parameters
) -> Parameters:
    """The tuned parameters, or as much of them as the budget allows."""
    share, found = 1.0, tuned
    floor = torch.zeros_like(tuned.sigma2)
    floor[0] = _INPUT_FLOOR / space.typical[0]
    # Towards the base's own predictions, which cost nothing; the input keeps its floor.
    while cost(found) > increase and share > 1e-15:
        share /= 2
        sigma2 = torch.maximum(share * tuned.sigma2, floor)
        warmer = tuned.temperature if space.temperature is not None else tuned.temperature**share
        found = Parameters(sigma2, warmer, tuned.noise)
    return found


def _metrics(
    validation: Outputs, outliers: Outputs | None, before: Parameters, after: Parameters
) -> dict[str, tuple[float, float]]:
    """What the tuning did to predictions, as pairs of before and after."""
    target = validation.labels
    p, q = validation.probabilities(before), validation.probabilities(after)
    pairs = {
        "validation accuracy": (accuracy(p, target), accuracy(q, target)),
        "validation NLL": (nll(p, target), nll(q, target)),
        "validation ECE": (ece(p, target), ece(q, target)),
        "mean confidence at data": (float(confidence(p).mean()), float(confidence(q).mean())),
    }
    if outliers is not None:
        p, q = outliers.probabilities(before), outliers.probabilities(after)
        pairs["mean confidence at outliers"] = (
            float(confidence(p).mean()),
            float(confidence(q).mean()),
        )
    return pairs


def _share(
    layers: Sequence[str], sigma2: Tensor, at_data: Tensor, at_outliers: Tensor | None
) -> dict[str, tuple[float, float | None]]:
    data = (sigma2 * at_data.median(0).values).tolist()
    far: list[float | None] = [None] * len(layers)
    if at_outliers is not None:
        far = (sigma2 * at_outliers.median(0).values).tolist()
    return {layer: (a, b) for layer, a, b in zip(layers, data, far, strict=True)}


def _notes(
    layers: Sequence[str],
    space: _Space,
    tuned: Parameters,
    trials: Sequence[Trial],
    converged: bool,
) -> list[str]:
    """What a person should know about the outcome."""
    notes = []
    # A lower temperature makes up for a larger scale: only the two together say how much it is.
    typical = (tuned.sigma2 * space.typical * tuned.temperature.square()).tolist()
    zero = [layer for layer, value in zip(layers, typical, strict=True) if value < 1e-6]
    infinite = [layer for layer, value in zip(layers, typical, strict=True) if value > 1e6]
    if float(tuned.sigma2[0] * space.typical[0]) < 2 * _INPUT_FLOOR:
        notes.append(
            f"sigma2 of the input ran towards zero and was held at {float(tuned.sigma2[0]):.2g}, "
            "where no prediction at the data notices it: this objective sees no use for variance "
            "there. Confidence still goes to 1/C, but further out; objective='ood' with "
            "outliers of your own brings that nearer"
        )
    if zero:
        notes.append(
            f"sigma2 ran to zero for {zero}: these layers do not help to tell the outliers from "
            "the data, or hurt the likelihood. Nothing is wrong; leave them out to save time"
        )
    if infinite:
        notes.append(
            f"sigma2 ran to infinity for {infinite}: predictions at the data are drowned there. "
            "The base is worse than guessing on these targets, or the labels do not belong to the "
            "inputs, or ood_weight is far too large"
        )
    if trials and all(trial.increase > 0 for trial in trials) and trials[-1].weight == 0:
        notes.append(
            "no weight of the outliers stays within the calibration budget; the variance was "
            "shrunk until it does. Allow a larger increase, or use temperature=True"
        )
    if not converged:
        notes.append("the search ended before its gradient vanished; the result may be improved")
    return notes
