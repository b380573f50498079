r"""What only held-out data can tell; see :meth:`rgpr.RGPR.calibrate`.

**The residual.** With :math:`R(x)` what the default residual compares with its onset, the fit left
:math:`w = (R - \kappa)_+`. Calibrating moves the onset to ``q`` and the slope to ``c``:
:math:`w' = c\,(R - q)_+`. Two rules bind it.

- *Not weaker.* :math:`c \ge 1` if :math:`q \le \kappa`, and then :math:`w' \ge w` everywhere; else
  :math:`c \ge 2 - \kappa / q`, and then :math:`w' \ge w` wherever :math:`R \ge 2 q`.
- *Within the budget.* The mean negative log-likelihood of the held-out data is at most
  ``max_nll_increase`` above what it is without the residual.

The first ``q`` that is tried is the 95 % quantile of :math:`R` at the held-out data, or
:math:`\kappa` if that is smaller. Among slopes up to ``6 / q`` the largest that keeps the budget is
taken. If none does, the onset moves to a higher quantile; at the maximum no held-out example has
any variance, so one always does.

**The temperature** is the best for the likelihood (of the base, or of the base with the paper's
residual, which adds to its variance), and never below what it was: a sharper answer would be a
weaker promise far away. It moves only if there are at least 100 labelled examples and their
likelihood gains more than two standard errors.

Fewer than 1000 labelled examples cannot tell differences of the size of the budget from chance.
Then the residual stays as it was if that keeps the budget, else the onset moves out to at most
:math:`2 \kappa`. It moves further only if the cost exceeds the budget by two standard errors: a
single example far out would otherwise disarm the residual.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics import accuracy, ece
from ..posteriors.gaussian import DiagonalGaussian, log_density
from ..posteriors.links import log_softmax, twice_probit_logits
from . import conformal
from .outputs import Outputs, collect
from .predictions import deviations, log_probabilities
from .score import score

if TYPE_CHECKING:
    from ..model import RGPR

__all__ = ["Calibration", "calibrate"]

# Labelled examples from which on their likelihood chooses a temperature, and onset and slope.
_FOR_TEMPERATURE, _FOR_ONSET = 100, 1000
# Quantiles of the held-out data that are tried as the onset, in this order.
_ONSETS = (0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
# The largest variance at twice the onset, in its unit, and the slopes that are tried below it.
_KAPPA, _SLOPES = 6.0, 25
_TEMPERATURES = torch.logspace(0, 1.3, 66, dtype=torch.float64)


@dataclass(frozen=True)
class Calibration:
    """What calibrating did; ``print`` it.

    Attributes:
        examples: How many held-out examples serve as references.
        seen: How many there were.
        labelled: Whether they had labels.
        temperature: Before and after.
        onset: The share of the held-out examples without any variance, before and after; ``None``
            for the paper's residual.
        slope: The factor on the variance beyond the onset, 1 if it stayed.
        nll: Mean negative log-likelihood of the held-out data: without residual and temperature,
            as the fit left it, and now. ``None`` without labels.
        ece: Likewise the calibration error, for classification.
        accuracy: Share of examples that are classified correctly.
        noise: Regression: variance of the observations around the base's mean.
        warnings: What to think about.
    """

    examples: int
    seen: int
    labelled: bool
    temperature: tuple[float, float]
    onset: tuple[float, float] | None
    slope: float
    nll: tuple[float, float, float] | None = None
    ece: tuple[float, float, float] | None = None
    accuracy: float | None = None
    noise: float | None = None
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kept = f"{self.examples} of {self.seen}" if self.examples < self.seen else f"{self.seen}"
        what = "labelled examples" if self.labelled else "examples without labels"
        smallest = 1 / (self.examples + 1)
        lines = [f"calibrated on {kept} {what}; the smallest p-value is {smallest:.2g}"]
        if self.accuracy is not None:
            lines.append(f"accuracy            {self.accuracy:.1%}")
        for name, values, scale, unit in (
            ("NLL", self.nll, 1.0, ""),
            ("ECE", self.ece, 100.0, " %"),
        ):
            if values is not None:
                base, before, after = (f"{scale * value:.4g}{unit}" for value in values)
                lines.append(f"{name}                 base {base}, fitted {before}, now {after}")
        if self.noise is not None:
            lines.append(f"observations' noise {self.noise:.3g} (variance)")
        if self.temperature[0] != self.temperature[1]:
            before, after = (f"{value:.3g}" for value in self.temperature)
            lines.append(f"temperature         {before} -> {after}")
        if self.onset is not None:
            before, after = (f"{share:.1%}" for share in self.onset)
            lines.append(f"exactly the base's  {before} -> {after} of these examples")
            changed = "unchanged" if self.slope == 1 else f"x {self.slope:.3g}"
            lines.append(f"variance beyond     {changed}")
        return "\n".join([*lines, *(f"! {warning}" for warning in self.warnings)])


def calibrate(
    model: RGPR, val_loader: Iterable[Any], max_nll_increase: float, progress: bool
) -> Calibration:
    """Read the data once, choose, set everything on the model, and report."""
    residual = model._fitted()
    if not max_nll_increase >= 0:
        raise ValueError(f"max_nll_increase = {max_nll_increase} must not be negative")
    outputs = collect(
        model._read,
        model.posterior,
        val_loader,
        shape=model._input_shape,
        link_approx="probit",
        n_samples=1,
        generator=torch.Generator(),
        likelihood=model.likelihood,
        optional=True,
        at_most=conformal.MOST_REFERENCES,
        progress=progress,
        description="rgpr calibrate",
        watch=model._fit_keys,
        keep_overflowed=True,
    )
    notes = _notes(model, outputs)
    given, temperature = model._as_given()
    dtype = torch.float64  # of what was collected, whatever the inputs have
    gaussian = DiagonalGaussian(outputs.first, outputs.second)
    strange = score(residual.strangeness(outputs.u), outputs.first, model.likelihood)
    label_scores: Tensor | None = None
    chosen = _Chosen(given.onset, given.slope, temperature)
    report: dict[str, Any] = {}
    if outputs.target is not None:
        if model.likelihood == "classification":
            own = log_probabilities(given, temperature, gaussian, outputs.u, dtype)
            label_scores = _of(conformal.class_scores(own), outputs.target)
        else:
            error = (outputs.target - outputs.first).abs()
            label_scores = (error / deviations(given, gaussian, outputs.u, dtype)).amax(1)
        # Of rows where the network overflowed only the scores are known.
        inside = outputs.u[:, 0] < torch.inf
        if bool(inside.any()):
            chosen, report = _choose(model, outputs.of(inside), max_nll_increase)
    onset = None
    if given.onset is not None and chosen.onset is not None:
        after = given.with_onset(chosen.onset, chosen.slope)
        quiet = [float((r.beyond(outputs.u) == 0).double().mean()) for r in (given, after)]
        onset = (quiet[0], quiet[1])
        if float(chosen.onset) > 2 * float(given.onset):
            notes.append(
                f"the variance sets in at {float(chosen.onset / given.onset):.3g} times the "
                "strangeness that fit left, since these data lie further out than the training "
                "data; inputs in between are answered as the base does. Are they of the same kind?"
            )
    residual.onset, residual.slope = chosen.onset, chosen.slope
    model._temperature = chosen.temperature
    model._references = strange.sort().values
    model._label_scores = None if label_scores is None else label_scores.sort().values
    for note in notes:
        warnings.warn(note, stacklevel=5)  # through the decorators of RGPR.calibrate
    return Calibration(
        examples=len(outputs),
        seen=outputs.seen,
        labelled=outputs.target is not None,
        temperature=(float(temperature), float(chosen.temperature)),
        onset=onset,
        slope=float(chosen.slope),
        warnings=notes,
        **report,
    )


@dataclass(frozen=True)
class _Chosen:
    """What calibrating sets."""

    onset: Tensor | None
    slope: Tensor
    temperature: Tensor


def _of(table: Tensor, target: Tensor) -> Tensor:
    return table.gather(1, target[:, None])[:, 0]


def _choose(model: RGPR, outputs: Outputs, budget: float) -> tuple[_Chosen, dict[str, Any]]:
    """Temperature, onset and slope, and how the likelihood fared."""
    given, temperature = model._as_given()
    if model.likelihood == "classification":
        losses: _Losses = _ClassLosses(outputs, given)
    else:
        losses = _NumberLosses(outputs, given)
    nothing = torch.zeros(len(outputs), dtype=torch.float64, device=outputs.u.device)
    base = float(losses(nothing, temperature).mean())
    as_fitted = given.beyond(outputs.u)
    before = float(losses(as_fitted, temperature).mean())
    warmer = temperature
    if len(outputs) >= _FOR_TEMPERATURE:
        warmer = losses.temperature(temperature, nothing if given.onset is not None else as_fitted)
    chosen, beyond = _Chosen(given.onset, given.slope, warmer), as_fitted
    if given.onset is not None and bool(given.sigma2.any()):
        without, R = losses(nothing, warmer), given.joint(outputs.u)

        def cost(beyond: Tensor) -> Tensor:
            return losses(beyond, warmer) - without

        q, c = _onset_and_slope(R, float(given.onset), cost, budget)
        chosen = _Chosen(torch.full_like(given.onset, q), torch.full_like(given.onset, c), warmer)
        beyond = c * (R - q).clamp_min(0)
    report: dict[str, Any] = {"nll": (base, before, float(losses(beyond, warmer).mean()))}
    report |= losses.report(
        (nothing, temperature), (as_fitted, temperature), (beyond, chosen.temperature)
    )
    return chosen, report


def _onset_and_slope(
    R: Tensor, kappa: float, cost: Callable[[Tensor], Tensor], budget: float
) -> tuple[float, float]:
    """``q`` and ``c`` by the rules at the head of this file.

    Args:
        R: What is compared with the onset, of the held-out data.
        kappa: The onset that the fit left; its slope is one.
        cost: What a variance costs each of the data in likelihood, ``(N,)``.
        budget: What it may cost on average.
    """
    onsets = [float(R.quantile(level)) for level in _ONSETS]
    if len(R) >= _FOR_ONSET:
        for q in (min(kappa, onsets[0]), *onsets):
            least = _least_slope(q, kappa)
            for c in _between(max(least, _KAPPA / q) if q > 0 else least, least):
                if float(cost(c * (R - q).clamp_min(0)).mean()) <= budget:
                    return q, c
        return _beyond_all(R, kappa)
    each = cost((R - kappa).clamp_min(0))
    # A single example has no standard error: it shows nothing.
    error = float(each.std()) / math.sqrt(len(R)) if len(R) > 1 else math.inf
    shown = float(each.mean()) - 2 * error > budget
    nearer = [q for q in onsets if kappa < q <= 2 * kappa]
    further = [q for q in onsets if q > 2 * kappa and shown]
    for q in (kappa, *nearer, 2 * kappa, *further):
        c = _least_slope(q, kappa)
        if float(cost(c * (R - q).clamp_min(0)).mean()) <= budget:
            return q, c
    return _beyond_all(R, kappa) if shown else (kappa, 1.0)


def _least_slope(q: float, kappa: float) -> float:
    """The smallest slope with which an onset at ``q`` is not weaker."""
    return 1.0 if q <= kappa else 2 - kappa / q


def _beyond_all(R: Tensor, kappa: float) -> tuple[float, float]:
    """Beyond every held-out example there is nothing left to pay."""
    q = max(kappa, float(R.max()))
    return q, _least_slope(q, kappa)


def _between(most: float, least: float) -> list[float]:
    """Slopes from the largest down to the smallest, evenly in their logarithms."""
    steps = (k / (_SLOPES - 1) for k in range(_SLOPES))
    return [math.exp(math.log(most) + step * math.log(least / most)) for step in steps]


class _Losses:
    """Negative log-likelihoods of the held-out examples, for any variance beyond the onset."""

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        """``(N,)``."""
        raise NotImplementedError

    def temperature(self, now: Tensor, beyond: Tensor) -> Tensor:
        """The best one, if there is a gain."""
        return now

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Other metrics, of the base, as fitted, and now."""
        raise NotImplementedError


class _ClassLosses(_Losses):
    def __init__(self, outputs: Outputs, given: Any) -> None:
        self._outputs, self._given = outputs, given

    def _log_probabilities(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        mean, variance = self._outputs.first, self._outputs.second
        if self._given.onset is None:  # the paper's residual adds to the base's variance
            added = DiagonalGaussian(mean, variance + (self._given.unit * beyond)[:, None])
            mean, variance, beyond = mean, added.variance, torch.zeros_like(beyond)
        return log_softmax(twice_probit_logits(mean, variance, beyond, temperature))

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        return -_of(self._log_probabilities(beyond, temperature), self._outputs.labels)

    def temperature(self, now: Tensor, beyond: Tensor) -> Tensor:
        candidates = now * _TEMPERATURES.to(now.device)
        means = torch.stack([self(beyond, candidate).mean() for candidate in candidates])
        best = candidates[means.argmin()]
        gain = self(beyond, now) - self(beyond, best)
        error = float(gain.std()) / math.sqrt(len(gain))
        return best if float(gain.mean()) > 2 * error else now

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        target = self._outputs.labels
        p = [self._log_probabilities(*state).exp() for state in states]
        errors = [ece(each, target) for each in p]
        return {"ece": tuple(errors), "accuracy": accuracy(p[0], target)}


class _NumberLosses(_Losses):
    """Of a regression, with the variance of the observations that fits the base best."""

    def __init__(self, outputs: Outputs, given: Any) -> None:
        self._outputs, self._given = outputs, given
        self._squares = (outputs.labels - outputs.first).square()
        unit = self._squares.mean().clamp_min(1e-300)
        candidates = unit * torch.logspace(-4, 1, 101, dtype=torch.float64, device=unit.device)
        means = [self._density(outputs.second + noise).mean() for noise in candidates]
        self._noise = candidates[torch.stack(means).argmin()]

    def _density(self, variance: Tensor) -> Tensor:
        return -log_density(self._squares, variance).sum(1)

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        v = (self._given.unit * beyond)[:, None]
        return self._density(self._outputs.second + v + self._noise)

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"noise": float(self._noise)}


def _notes(model: RGPR, outputs: Outputs) -> list[str]:
    """What a person should know about the data they calibrate with."""
    notes = []
    keys, count = model._fit_keys, model._fit_count
    if keys is not None and count is not None:
        # If these examples were drawn from the training data, so many of them would be known.
        expected = len(keys) * min(1.0, outputs.seen / int(count))
        if outputs.watched >= max(2.0, 0.5 * expected):
            notes.append(
                f"{outputs.watched} of these inputs are training inputs that fit saw; their scores "
                "are too small, and p-values and sets will not keep their promise. Calibrate with "
                "inputs that were held out"
            )
    if len(outputs) < conformal.references_for(0.05):
        needed = conformal.references_for(0.05)
        notes.append(
            f"{len(outputs)} examples: no p-value is below 1/{len(outputs) + 1}, so "
            f"flag(alpha=0.05) is refused; that takes {needed}"
        )
    target = outputs.target
    classes = target if model.likelihood == "classification" else None
    if classes is not None and len(classes) > 1 and bool((classes == classes[0]).all()):
        notes.append(
            f"all labels are {int(classes[0])}: what is learned holds for inputs of that class "
            "alone. Calibrate with all classes, as often as they will come"
        )
    return notes
