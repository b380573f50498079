r"""The prior precision of a Laplace approximation, by the likelihood of validation data.

A grid from 1e-4 to 1e4 is searched first. Where the best precision of it is an end of those that
give finite predictions, the search goes on beyond that end in the same steps. It stops

- above, where the likelihood falls, or where the largest variance of any logit at the validation
  data is at most 1e-4. There the probit multiplies logits by :math:`1 / \sqrt{1 + \pi v / 8}`,
  more than :math:`1 - 2 \cdot 10^{-5}`: these data prefer no variance, and the posterior is MAP;
- below, where the likelihood falls or stays, or where predictions are no longer finite;
- at 1e-12 and at 1e12 in any case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._network.batches import Batch
from .._network.checks import network_dtype_device
from .._network.guards import evaluating
from .._network.loaders import labelled, on_device
from .._network.sources import as_batches
from ..likelihoods.classification import Classification
from ..likelihoods.labels import of_target
from .base import Posterior
from .gaussian import Gaussian
from .laplace_torch import (
    check_fitted,
    closed_form,
    from_laplace,
    likelihood_of,
    network_and_head,
    network_of,
    structure_of,
)
from .last_layer_laplace import point_and_features
from .links import probit_logits

__all__ = ["PriorChoice", "choose_prior_precision", "find_prior_precision"]

# Where the search stops at the latest; a little more, as steps do not meet powers of ten exactly.
LOWEST, HIGHEST = 0.999e-12, 1.001e12
NEGLIGIBLE = 1e-4
# Differences between mean losses that can come from variances which were rounded to float32.
TOLERANCE = 1e-7

Stop = Literal["grid", "fell", "flat", "not finite", "bound", "no variance"]


@dataclass(frozen=True)
class PriorChoice:
    """Which prior precision validation data chose, and from what.

    Attributes:
        precision: The chosen one.
        lowest: The smallest precision that was tried.
        highest: The largest one.
        extended: Whether an end of the first grid was the best of it, so that more were tried.
        nll: Mean negative log-likelihood of the validation data under the chosen precision.
        map_nll: The same without any variance, which is MAP.
        variance: The largest variance of a logit at the validation data.
        stop: Why no precision beyond the chosen one was taken:

            - ``"grid"``: the chosen one lies within the first grid, or the grid has no other;
            - ``"fell"``: the likelihood is smaller beyond it;
            - ``"flat"``: the likelihood is the same below it;
            - ``"not finite"``: predictions are not finite beyond it;
            - ``"bound"``: the search goes no further in any case;
            - ``"no variance"``: the variance is negligible, which is MAP.
    """

    precision: float
    lowest: float
    highest: float
    extended: bool
    nll: float
    map_nll: float
    variance: float
    stop: Stop

    @property
    def equals_map(self) -> bool:
        """Whether the variance is too small to change any prediction at the data."""
        return self.variance <= NEGLIGIBLE

    @property
    def at_an_end(self) -> bool:
        """Whether the search ended at the chosen precision, without a worse one beyond it."""
        return self.stop not in ("grid", "fell")

    @property
    def verdict(self) -> str:
        """What to think of a choice at an end of the search; empty for one between the ends."""
        if not self.at_an_end:
            return ""
        if self.stop == "no variance":
            return (
                "the data prefer no variance: this is MAP. With the prior precision "
                f"{self.precision:.3g} no logit has a variance above {self.variance:.2g} at the "
                "validation data. Wrap the network itself, choose with more validation data, or "
                "take the marginal likelihood, la.optimize_prior_precision(method='marglik')"
            )
        if self.precision == self.highest:
            return (
                f"the largest prior precision that was tried, {self.precision:.3g}, is the best, "
                f"and logits still have variances up to {self.variance:.2g}; scale the features of "
                "the last layer down, or set la.prior_precision yourself"
            )
        smaller = {
            "flat": "smaller ones change nothing",
            "not finite": "smaller ones give no finite predictions",
            "bound": "no smaller one is tried",
        }[self.stop]
        return (
            "these data prefer as much variance as there can be: the prior precision "
            f"{self.precision:.3g} is the best, and {smaller}. Look whether the network is far too "
            "sure of wrong answers, or set la.prior_precision yourself"
        )


def choose_prior_precision(
    la: Any, val_loader: Iterable[Any], *, grid_size: int = 41, progress: bool = True
) -> Posterior:
    """Set a fitted laplace-torch object's prior precision by the likelihood of validation data.

    The best of a grid from 1e-4 to 1e4 for the probit; where that is an end of the grid, the search
    goes on beyond it, see :mod:`rgpr.posteriors.prior_precision`. Of a last layer the network runs
    once, and each precision takes our closed form; of all layers it runs for each.

    Args:
        la: The object, for classification; it is changed.
        val_loader: Yields ``(x, y)`` that the network was not trained on.
        grid_size: How many precisions the grid has.
        progress: Show a progress bar where there is a terminal.

    Returns:
        The posterior with the best one.

    Warns:
        UserWarning: The search ended without a worse precision beyond the best, such as where the
            data prefer no variance at all, or as much as there can be.

    Raises:
        TypeError: It is not for classification.
        ValueError: None of them gives finite predictions, or a batch's targets are not classes;
            the object is as it was then.
    """
    posterior, choice = find_prior_precision(la, val_loader, grid_size=grid_size, progress=progress)
    if choice.verdict:
        warnings.warn(choice.verdict, stacklevel=2)
    return posterior


@torch.no_grad()
def find_prior_precision(
    la: Any, val_loader: Iterable[Any], *, grid_size: int = 41, progress: bool = True
) -> tuple[Posterior, PriorChoice]:
    """:func:`choose_prior_precision` that gives a record of the choice instead of a warning."""
    if likelihood_of(la) != "classification":
        raise TypeError(
            f"this {type(la).__name__} is for {likelihood_of(la)}; the probit is for "
            "classification. la.optimize_prior_precision() takes any"
        )
    if grid_size < 1:
        raise ValueError(f"grid_size = {grid_size}; expected at least one precision")
    check_fitted(la)
    network = network_of(la)
    data = as_batches(val_loader, network)
    batches = labelled(data, network, progress=progress, description="prior precision")
    gaussians = _by_features(la, batches) if structure_of(la) else _by_passes(la, batches)
    before = la.prior_precision
    try:
        search = _Search(la, gaussians)
        best = search.on_grid(torch.logspace(-4, 4, grid_size).tolist())
        la.prior_precision = best
        return from_laplace(la), search.choice(best)
    except BaseException:
        la.prior_precision = before
        raise


_Predictions = Callable[[], Iterator[tuple[Gaussian, Tensor]]]


class _Search:
    """Tries prior precisions, and keeps what each of them gave.

    Args:
        la: The fitted object, whose precision is set for every trial.
        gaussians: Gives predictions and targets for the precision that ``la`` has then.
    """

    def __init__(self, la: Any, gaussians: _Predictions) -> None:
        self.la, self.gaussians = la, gaussians
        self.losses: dict[float, float] = {}
        self.variances: dict[float, float] = {}
        self.map_nll = math.inf
        self.extended = False
        self.stop: Stop = "grid"

    def on_grid(self, grid: list[float]) -> float:
        """The best precision of a grid, or of what lies beyond the end that was the best of it."""
        for precision in grid:
            self._try(precision)
        best = min(self.losses, key=self.losses.__getitem__)
        if math.isinf(self.losses[best]):
            raise ValueError(
                "no prior precision from 1e-4 to 1e4 gives finite predictions; look at the "
                "network's outputs and at the Hessian that la.fit found"
            )
        finite = [precision for precision in grid if math.isfinite(self.losses[precision])]
        if len(grid) > 1 and best in (finite[0], finite[-1]):
            step = grid[1] / grid[0]
            best, self.stop = self._beyond(best, step if best == finite[-1] else 1 / step)
        return best

    def _beyond(self, best: float, step: float) -> tuple[float, Stop]:
        """Goes on from an end of the grid; gives the best precision, and why it is the last.

        Upwards a likelihood that stays is no reason to stop, as every step makes the posterior more
        like MAP. Downwards it is one, as the prior no longer counts beside the data.
        """
        while step < 1 or self.variances[best] > NEGLIGIBLE:
            following, least = best * step, min(self.losses.values())
            if not LOWEST <= following <= HIGHEST:
                return best, "bound"
            self.extended = True
            rise = self._try(following) - least
            if rise > TOLERANCE:
                return best, "fell" if math.isfinite(rise) else "not finite"
            if step < 1 and rise >= -TOLERANCE:
                return best, "flat"
            best = following
        return best, "no variance"

    def _try(self, precision: float) -> float:
        self.la.prior_precision = precision
        losses, without, variance = [], [], 0.0
        try:
            for number, (gaussian, target) in enumerate(self.gaussians()):
                y = Classification().target(target, gaussian.mean.shape, number)
                losses.append(_losses(probit_logits(gaussian.mean, gaussian.variance), y))
                without.append(_losses(gaussian.mean, y))
                variance = max(variance, float(gaussian.variance.max()))
            mean = float(torch.cat(losses).mean())
            # Means do not depend on the precision, so every pass gives the same loss for MAP.
            self.map_nll = float(torch.cat(without).mean())
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            mean = math.inf  # too small for a Hessian that rounding left indefinite
        self.losses[precision] = math.inf if math.isnan(mean) else mean
        self.variances[precision] = variance
        return self.losses[precision]

    def choice(self, best: float) -> PriorChoice:
        """The record of the best precision."""
        return PriorChoice(
            precision=best,
            lowest=min(self.losses),
            highest=max(self.losses),
            extended=self.extended,
            nll=self.losses[best],
            map_nll=self.map_nll,
            variance=self.variances[best],
            stop=self.stop,
        )


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of each example of a batch, in float64.

    It is taken from logits, because the probability of a class that is surely wrong rounds to zero.
    """
    logs = Classification().log_probabilities(logits.double())
    return -of_target(logs, on_device(y, logs.device))


def _by_features(la: Any, batches: Iterable[tuple[Batch, Tensor]]) -> _Predictions:
    """What gives the predictions, and the targets, for the precision that ``la`` has then."""
    network, name = network_and_head(la)
    device = network_dtype_device(network)[1]
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    with evaluating(network) as modes, modes:
        for x, y in batches:
            mean, features = point_and_features(network, name, on_device(x, device))
            kept.append((mean.clone(), features.clone(), y))  # or all activations stay with them

    def gaussians() -> Iterator[tuple[Gaussian, Tensor]]:
        posterior = closed_form(la, network, name)
        for mean, features, target in kept:
            yield posterior._gaussian(mean, features), target

    return gaussians


def _by_passes(la: Any, batches: Iterable[tuple[Batch, Tensor]]) -> _Predictions:
    """The same by a pass of the network for each precision."""
    kept = list(batches)

    def gaussians() -> Iterator[tuple[Gaussian, Tensor]]:
        posterior = from_laplace(la)
        device = network_dtype_device(posterior.network)[1]
        with evaluating(posterior) as modes, modes:
            for x, target in kept:
                yield posterior(on_device(x, device)), target

    return gaussians
