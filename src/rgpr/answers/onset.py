r"""Where the variance sets in, how fast it grows, and the temperature, within a budget.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..extension import Extension
from ..likelihoods import LabelLikelihood
from ..likelihoods.labels import of_target
from ..likelihoods.regression import log_density
from ..posteriors.links import probit_logits
from ..residual.variance import AT_TWICE_THE_ONSET, Residual
from .examples import Examples
from .probabilities import flatness

__all__ = ["Chosen", "choose"]

# Labelled examples from which on their likelihood chooses a temperature, and onset and slope.
_FOR_TEMPERATURE, _FOR_ONSET = 100, 1000
# Quantiles of the held-out data that are tried as the onset, in this order.
_ONSETS = (0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
# So many slopes are tried below the largest.
_SLOPES = 25
# Temperatures that are tried, as factors on the present one.
_TEMPERATURES = torch.logspace(0, 1.3, 66, dtype=torch.float64)


@dataclass(frozen=True)
class Chosen:
    """Where and how the variance sets in, and the temperature.

    Attributes:
        onset: Where the variance sets in; ``None`` for the paper's residual.
        slope: The factor on the variance beyond it.
        temperature: The number that logits are divided by.
    """

    onset: Tensor | None
    slope: Tensor
    temperature: Tensor


def choose(
    extension: Extension, examples: Examples, budget: float
) -> tuple[Chosen, dict[str, Any]]:
    """Temperature, onset and slope, and how the likelihood fared."""
    given, temperature = extension.residual, extension.temperature
    losses: _Losses
    if isinstance(extension.likelihood, LabelLikelihood):
        losses = _LabelLosses(examples, given, extension.likelihood)
    else:
        losses = _NumberLosses(examples, given)
    nothing = torch.zeros(len(examples), dtype=torch.float64, device=examples.u.device)
    base = float(losses(nothing, temperature).mean())
    as_fitted = given.beyond(examples.u)
    before = float(losses(as_fitted, temperature).mean())
    warmer = temperature
    if len(examples) >= _FOR_TEMPERATURE:
        warmer = losses.temperature(temperature, nothing if given.onset is not None else as_fitted)
    chosen, beyond = Chosen(given.onset, given.slope, warmer), as_fitted
    if given.onset is not None and bool(given.sigma2.any()):
        without, R = losses(nothing, warmer), given.joint(examples.u)

        def cost(beyond: Tensor) -> Tensor:
            return losses(beyond, warmer) - without

        q, c = _onset_and_slope(R, float(given.onset), cost, budget)
        chosen = Chosen(torch.full_like(given.onset, q), torch.full_like(given.onset, c), warmer)
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
            for c in _between(max(least, AT_TWICE_THE_ONSET / q) if q > 0 else least, least):
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
    """An onset at the largest held-out value, where no held-out example has any variance."""
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


class _LabelLosses(_Losses):
    """Those of labels, by the probit; each is the sum over the labels of an example."""

    def __init__(self, examples: Examples, given: Residual, likelihood: LabelLikelihood) -> None:
        self._examples, self._given, self._likelihood = examples, given, likelihood

    def _log_probabilities(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        mean, variance = self._examples.first, self._examples.second
        if self._given.onset is None:  # the paper's residual adds to the base's variance
            variance = variance + (self._given.unit * beyond)[:, None]
            beyond = torch.zeros_like(beyond)
        logits = probit_logits(mean, variance) * flatness(beyond) / temperature
        return self._likelihood.log_probabilities(logits)

    def __call__(self, beyond: Tensor, temperature: Tensor) -> Tensor:
        each = of_target(self._log_probabilities(beyond, temperature), self._examples.labels)
        return -each.reshape(len(each), -1).sum(1)

    def temperature(self, now: Tensor, beyond: Tensor) -> Tensor:
        candidates = now * _TEMPERATURES.to(now.device)
        means = torch.stack([self(beyond, candidate).mean() for candidate in candidates])
        best = candidates[means.argmin()]
        gain = self(beyond, now) - self(beyond, best)
        error = float(gain.std()) / math.sqrt(len(gain))
        return best if float(gain.mean()) > 2 * error else now

    def report(self, *states: tuple[Tensor, Tensor]) -> dict[str, Any]:
        target, likelihood = self._examples.labels, self._likelihood
        p = [self._log_probabilities(*state).exp() for state in states]
        errors = [likelihood.ece(each, target) for each in p]
        return {"ece": tuple(errors), "accuracy": likelihood.accuracy(p[0], target)}


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
