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
from typing import Any

import torch
from torch import Tensor

from ..extension import Extension, Reading
from ..metrics import accuracy, ece
from ..posteriors.gaussian import DiagonalGaussian, Gaussian, log_density
from ..posteriors.links import log_softmax, probit_logits
from ..residual.variance import Residual
from . import conformal
from .examples import Examples, Wanted, collect
from .probabilities import deviations, log_probabilities, once_more
from .score import weighed

__all__ = ["Calibrated", "Calibration", "calibrate"]

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


@dataclass(frozen=True)
class Calibrated:
    """What calibrating sets on a model.

    Attributes:
        onset: Where the variance sets in; ``None`` for the paper's residual.
        slope: The factor on the variance beyond it.
        temperature: What logits are divided by.
        references: Scores of the held-out inputs, in ascending order.
        label_scores: Conformal scores of their labels, in ascending order; ``None`` without labels.
    """

    onset: Tensor | None
    slope: Tensor
    temperature: Tensor
    references: Tensor
    label_scores: Tensor | None


def calibrate(
    given: Extension,
    val_loader: Iterable[Any],
    fitted_on: tuple[Tensor, int] | None,
    *,
    max_nll_increase: float,
    progress: bool,
) -> tuple[Calibrated, Calibration]:
    """Read held-out data once, choose, and report; nothing is changed.

    Args:
        given: The model as the fit or the user left it.
        val_loader: The data.
        fitted_on: Keys of some training inputs and how many inputs there were, if known.
        max_nll_increase: The budget.
        progress: Show a progress bar where there is a terminal.
    """
    if not max_nll_increase >= 0:
        raise ValueError(f"max_nll_increase = {max_nll_increase} must not be negative")
    wanted = Wanted(
        "rgpr calibrate",
        progress,
        targets="optional",
        at_most=conformal.MOST_REFERENCES,
        watch=None if fitted_on is None else fitted_on[0],
        keep_overflowed=True,
    )
    examples = collect(given, val_loader, wanted)
    notes = _notes(given, examples, fitted_on)
    chosen = _Chosen(given.residual.onset, given.residual.slope, given.temperature)
    report: dict[str, Any] = {}
    # Of rows where the network overflowed only the scores are known.
    inside = examples.u[:, 0] < torch.inf
    if examples.target is not None and bool(inside.any()):
        chosen, report = _choose(given, examples.of(inside), max_nll_increase)
    strangeness = given.residual.strangeness(examples.u)
    references = weighed(strangeness, examples.first, given.likelihood).sort().values
    label_scores = None if examples.target is None else _label_scores(given, examples)
    onset = _quiet(given, examples, chosen, notes)
    for note in notes:
        warnings.warn(note, stacklevel=5)  # through the decorators of RGPR.calibrate
    found = Calibrated(chosen.onset, chosen.slope, chosen.temperature, references, label_scores)
    return found, Calibration(
        examples=len(examples),
        seen=examples.seen,
        labelled=examples.target is not None,
        temperature=(float(given.temperature), float(chosen.temperature)),
        onset=onset,
        slope=float(chosen.slope),
        warnings=notes,
        **report,
    )


@dataclass(frozen=True)
class _Chosen:
    """Onset, slope and temperature."""

    onset: Tensor | None
    slope: Tensor
    temperature: Tensor


def _label_scores(given: Extension, examples: Examples) -> Tensor:
    """How strange each label is given the answer, in ascending order, ``(N,)``."""
    gaussian = DiagonalGaussian(examples.first, examples.second)
    # What was collected is float64, whatever dtype the inputs have.
    reading: Reading[Gaussian] = Reading(gaussian, examples.u, torch.float64)
    if given.likelihood == "classification":
        every = conformal.class_scores(log_probabilities(given, reading))
        return _of(every, examples.labels).sort().values
    error = (examples.labels - examples.first).abs()
    return (error / deviations(given, reading)).amax(1).sort().values


def _quiet(
    given: Extension, examples: Examples, chosen: _Chosen, notes: list[str]
) -> tuple[float, float] | None:
    """The share of the examples without any variance, before and after; a note if it moved far."""
    before = given.residual.onset
    if before is None or chosen.onset is None:
        return None
    if float(chosen.onset) > 2 * float(before):
        notes.append(
            f"the variance sets in at {float(chosen.onset / before):.3g} times the "
            "strangeness that fit left, since these data lie further out than the training "
            "data; inputs in between are answered as the base does. Are they of the same kind?"
        )
    after = given.residual.with_onset(chosen.onset, chosen.slope)
    shares = [float((r.beyond(examples.u) == 0).double().mean()) for r in (given.residual, after)]
    return shares[0], shares[1]


def _of(table: Tensor, target: Tensor) -> Tensor:
    return table.gather(1, target[:, None])[:, 0]


def _choose(
    extension: Extension, examples: Examples, budget: float
) -> tuple[_Chosen, dict[str, Any]]:
    """Temperature, onset and slope, and how the likelihood fared."""
    given, temperature = extension.residual, extension.temperature
    losses: _Losses
    if extension.likelihood == "classification":
        losses = _ClassLosses(examples, given)
    else:
        losses = _NumberLosses(examples, given)
    nothing = torch.zeros(len(examples), dtype=torch.float64, device=examples.u.device)
    base = float(losses(nothing, temperature).mean())
    as_fitted = given.beyond(examples.u)
    before = float(losses(as_fitted, temperature).mean())
    warmer = temperature
    if len(examples) >= _FOR_TEMPERATURE:
        warmer = losses.temperature(temperature, nothing if given.onset is not None else as_fitted)
    chosen, beyond = _Chosen(given.onset, given.slope, warmer), as_fitted
    if given.onset is not None and bool(given.sigma2.any()):
        without, R = losses(nothing, warmer), given.joint(examples.u)

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
    def __init__(self, examples: Examples, given: Residual) -> None:
        self._examples, self._given = examples, given

    def _log_probabilities(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        mean, variance = self._examples.first, self._examples.second
        if self._given.onset is None:  # the paper's residual adds to the base's variance
            variance = variance + (self._given.unit * beyond)[:, None]
            beyond = torch.zeros_like(beyond)
        return log_softmax(once_more(probit_logits(mean, variance), beyond) / temperature)

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        return -_of(self._log_probabilities(beyond, temperature), self._examples.labels)

    def temperature(self, now: Tensor, beyond: Tensor) -> Tensor:
        candidates = now * _TEMPERATURES.to(now.device)
        means = torch.stack([self(beyond, candidate).mean() for candidate in candidates])
        best = candidates[means.argmin()]
        gain = self(beyond, now) - self(beyond, best)
        error = float(gain.std()) / math.sqrt(len(gain))
        return best if float(gain.mean()) > 2 * error else now

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        target = self._examples.labels
        p = [self._log_probabilities(*state).exp() for state in states]
        errors = [ece(each, target) for each in p]
        return {"ece": tuple(errors), "accuracy": accuracy(p[0], target)}


class _NumberLosses(_Losses):
    """Of a regression, with the variance of the observations that fits the base best."""

    def __init__(self, examples: Examples, given: Residual) -> None:
        self._examples, self._given = examples, given
        self._squares = (examples.labels - examples.first).square()
        unit = self._squares.mean().clamp_min(1e-300)
        candidates = unit * torch.logspace(-4, 1, 101, dtype=torch.float64, device=unit.device)
        means = [self._density(examples.second + noise).mean() for noise in candidates]
        self._noise = candidates[torch.stack(means).argmin()]

    def _density(self, variance: Tensor) -> Tensor:
        return -log_density(self._squares, variance).sum(1)

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        v = (self._given.unit * beyond)[:, None]
        return self._density(self._examples.second + v + self._noise)

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"noise": float(self._noise)}


def _notes(given: Extension, examples: Examples, fitted_on: tuple[Tensor, int] | None) -> list[str]:
    """What a person should know about the data they calibrate with."""
    notes = []
    if fitted_on is not None:
        keys, count = fitted_on
        # If these examples were drawn from the training data, so many of them would be known.
        expected = len(keys) * min(1.0, examples.seen / count)
        if examples.watched >= max(2.0, 0.5 * expected):
            notes.append(
                f"{examples.watched} of these inputs are training inputs that fit saw; their "
                "scores are too small, and p-values and sets will not keep their promise. "
                "Calibrate with inputs that were held out"
            )
    if len(examples) < conformal.references_for(0.05):
        needed = conformal.references_for(0.05)
        notes.append(
            f"{len(examples)} examples: no p-value is below 1/{len(examples) + 1}, so "
            f"flag(alpha=0.05) is refused; that takes {needed}"
        )
    target = examples.target
    classes = target if given.likelihood == "classification" else None
    if classes is not None and len(classes) > 1 and bool((classes == classes[0]).all()):
        notes.append(
            f"all labels are {int(classes[0])}: what is learned holds for inputs of that class "
            "alone. Calibrate with all classes, as often as they will come"
        )
    return notes
