"""What a user asked of tuning: defaults filled in, and combinations that make no sense refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._network.checks import check_counts
from ..answers.probabilities import check_link
from ..extension import Extension
from ..likelihoods import LabelLikelihood

__all__ = ["Options"]

# The largest weight of the outliers that a budget looks at first: "outliers are everything".
_LARGEST_WEIGHT = 100.0
# The paper's weight of the outliers, without a budget.
_PAPER_WEIGHT = 0.5


@dataclass(frozen=True)
class Options:
    """The options of :meth:`rgpr.RGPR.tune`, which documents each of them."""

    objective: str = "likelihood"
    ood: Iterable[Any] | None = None
    ood_weight: float | None = None
    link_approx: str = "probit"
    n_samples: int = 20
    temperature: bool = False
    max_nll_increase: float | None = None
    max_ece_increase: float | None = None
    noise: float | None = None
    max_examples: int | None = 20_000
    seed: int = 0
    progress: bool = True

    @property
    def numbers(self) -> dict[str, Any]:
        """All of them but the outliers and what is shown, by name."""
        return {k: v for k, v in vars(self).items() if k not in ("ood", "progress")}

    @property
    def budgets(self) -> dict[str, float]:
        """The metrics that may not rise by more than so much; at most one of them."""
        limits = {"nll": self.max_nll_increase, "ece": self.max_ece_increase}
        return {metric: limit for metric, limit in limits.items() if limit is not None}

    @property
    def weight(self) -> float:
        """The weight of the outliers, or with a budget the largest that is tried."""
        if self.ood_weight is not None:
            return self.ood_weight
        return _LARGEST_WEIGHT if self.budgets else _PAPER_WEIGHT

    def check(self, extension: Extension) -> None:
        """Refuse options that fit neither each other nor the model.

        What an objective cannot do it says itself, see
        :meth:`rgpr.tuning.objectives.Objective.check`.

        Raises:
            ValueError: The message names the option and what to use instead.
        """
        if extension.residual.onset is not None:
            raise ValueError(
                "the default residual has no scales to tune: call model.calibrate(val_loader), "
                "which sets how it answers from held-out data. The paper's objectives choose the "
                "scales of RGPR(..., residual='paper')"
            )
        if self.max_examples is not None and self.max_examples < 1:
            raise ValueError(f"max_examples = {self.max_examples} must be at least 1, or None")
        check_counts(n_samples=self.n_samples)
        check_link(self.link_approx, extension.likelihood, diagonal=True)
        if not self.weight >= 0:
            raise ValueError(f"ood_weight = {self.weight} must not be negative")
        if len(self.budgets) > 1:
            raise ValueError("give max_nll_increase or max_ece_increase, not both")
        if any(not limit >= 0 for limit in self.budgets.values()):
            raise ValueError(f"the budget {self.budgets} must not be negative")
        regression = not isinstance(extension.likelihood, LabelLikelihood)
        if regression and (self.temperature or self.budgets or self.link_approx != "probit"):
            raise ValueError(
                "temperature, calibration budgets and link_approx='mc' are about class "
                "probabilities; this model is a regression"
            )
        if self.noise is not None and (not regression or not self.noise > 0):
            raise ValueError(
                f"noise = {self.noise}: the positive variance of a regression's observations"
            )
