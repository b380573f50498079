r"""The prior precision of a Laplace approximation, by the likelihood of validation data.

A grid from 1e-4 to 1e4 is searched first. Where its best precision is one of its ends, the search
goes on beyond that end in the same steps. It stops

- above, where the likelihood falls, or where the largest variance of any logit at the validation
  data is at most 1e-4. There the probit multiplies logits by :math:`1 / \sqrt{1 + \pi v / 8}`,
  more than :math:`1 - 2 \cdot 10^{-5}`: these data prefer no variance, and the posterior is MAP;
- below, where the likelihood no longer rises;
- at 1e-12 and at 1e12 in any case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from .._network.batches import Batch
from .._network.checks import network_dtype_device
from .._network.guards import evaluating
from .._network.loaders import labelled, on_device
from .._network.sources import as_batches
from ..likelihoods.classification import Classification
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
from .links import probit

__all__ = ["PriorChoice", "choose_prior_precision", "find_prior_precision"]

# Where the search stops at the latest; a little more, as steps do not meet powers of ten exactly.
LOWEST, HIGHEST = 0.999e-12, 1.001e12
NEGLIGIBLE = 1e-4
# Differences between mean losses that rounding in float32 can make.
TOLERANCE = 1e-6


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
    """

    precision: float
    lowest: float
    highest: float
    extended: bool
    nll: float
    map_nll: float
    variance: float

    @property
    def equals_map(self) -> bool:
        """Whether the variance is too small to change any prediction at the data."""
        return self.variance <= NEGLIGIBLE

    @property
    def at_an_end(self) -> bool:
        """Whether the search ended at the chosen precision, without a worse one beyond it."""
        return self.lowest < self.highest and self.precision in (self.lowest, self.highest)

    @property
    def verdict(self) -> str:
        """What to think of a choice at an end of the search; empty for one between the ends."""
        if not self.at_an_end:
            return ""
        if self.precision == self.lowest:
            return (
                f"the smallest prior precision that was tried, {self.precision:.3g}, is the best: "
                "these data prefer as much variance as there can be. Look whether the network is "
                "far too sure of wrong answers, or set la.prior_precision yourself"
            )
        if self.equals_map:
            return (
                "the data prefer no variance: this is MAP. With the prior precision "
                f"{self.precision:.3g} no logit has a variance above {self.variance:.2g} at the "
                "validation data. Wrap the network itself, choose with more validation data, or "
                "take the marginal likelihood, la.optimize_prior_precision(method='marglik')"
            )
        return (
            f"the largest prior precision that was tried, {self.precision:.3g}, is the best, and "
            f"logits still have variances up to {self.variance:.2g}; scale the features of the "
            "last layer down, or set la.prior_precision yourself"
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
        UserWarning: The best precision is the last that was tried, such as where the data prefer
            no variance at all.

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
        self.extended = False

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
        if len(grid) > 1 and best in (grid[0], grid[-1]):
            step = grid[1] / grid[0]
            best = self._beyond(best, step if best == grid[-1] else 1 / step)
        return best

    def _beyond(self, best: float, step: float) -> float:
        """Goes on from an end of the grid, up to negligible variance, down to negligible priors.

        Upwards it stops where the likelihood falls, as every step makes the posterior more like
        MAP. Downwards it stops where the likelihood no longer rises, as the prior no longer counts
        beside the data.
        """
        margin = TOLERANCE if step > 1 else -TOLERANCE
        while step < 1 or self.variances[best] > NEGLIGIBLE:
            following, least = best * step, min(self.losses.values())
            if not LOWEST <= following <= HIGHEST:
                break
            self.extended = True
            if self._try(following) > least + margin:
                break
            best = following
        return best

    def _try(self, precision: float) -> float:
        self.la.prior_precision = precision
        losses, variance = [], 0.0
        try:
            for number, (gaussian, target) in enumerate(self.gaussians()):
                zero = gaussian.variance.new_zeros(len(gaussian.mean))
                losses.append(_losses(probit(gaussian, zero), gaussian, target, number))
                variance = max(variance, float(gaussian.variance.max()))
            mean = float(torch.cat(losses).mean())
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            mean = math.inf  # too small for a Hessian that rounding left indefinite
        self.losses[precision] = math.inf if math.isnan(mean) else mean
        self.variances[precision] = variance
        return self.losses[precision]

    def choice(self, best: float) -> PriorChoice:
        """The record of the best precision, which ``la`` has now."""
        without = [
            _losses(gaussian.mean.double().softmax(1), gaussian, target, number)
            for number, (gaussian, target) in enumerate(self.gaussians())
        ]
        return PriorChoice(
            precision=best,
            lowest=min(self.losses),
            highest=max(self.losses),
            extended=self.extended,
            nll=self.losses[best],
            map_nll=float(torch.cat(without).mean()),
            variance=self.variances[best],
        )


def _losses(p: Tensor, gaussian: Gaussian, target: Tensor, number: int) -> Tensor:
    """Negative log-likelihood of each example of a batch."""
    y = Classification().target(target, gaussian.mean.shape, number)
    return nll_loss(p.log(), on_device(y, p.device), reduction="none")


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
