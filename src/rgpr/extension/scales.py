"""Harmless scales, set by how far data like the training data lie from it.

A sample of the training inputs shows that. While there are few examples for each coordinate, every
input of the sample is measured by statistics that leave it out, see
:mod:`rgpr.residual.leave_one_out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._network.batches import copied, run
from .._network.guards import evaluating
from .._network.kept import Kept
from .._network.outputs import outputs_of
from .._network.representation import Representation
from .._network.running import capture
from ..likelihoods import LabelLikelihood, Likelihood
from ..posteriors import Posterior
from ..posteriors.gaussian import Gaussian
from ..residual.collecting import Collector
from ..residual.variance import AT_TWICE_THE_ONSET, Residual

__all__ = ["Sample", "set_onset", "set_paper_scales"]

# The paper's residual, untuned: all layers together add about this much variance at the 95 %
# quantile of the training data, where the probit then shrinks logits by 2 %.
_UNTUNED_VARIANCE = 0.1
_PAPER_PROBE = 256
# The onset lies at this quantile of data like the training data.
_ONSET_QUANTILE = 0.98
# With so many examples for each coordinate, the training data are measured as other data are.
_ENOUGH = 40
# A typical size below this is rounding: the representation never varied.
_LEAST = 1e-12


@dataclass(frozen=True)
class Sample:
    """Training inputs, and how to run the network on them.

    Attributes:
        posterior: The base.
        likelihood: What its outputs stand for.
        layers: The representations that are read.
        x: The inputs.
        y: Their classes, or -1.
        batch: A number of rows that the network is known to take.
    """

    posterior: Posterior
    likelihood: Likelihood
    layers: Sequence[Representation]
    x: Kept
    y: Tensor
    batch: int

    def outputs_and_u(self, residual: Residual) -> tuple[Tensor, Tensor]:
        """The outputs ``(N, C)`` and ``u`` ``(N, L)``, by the statistics of all data.

        Logits are left out, so that there are no outputs then, ``(N, 0)``.
        """
        outputs, _, columns = self._run([c.unit_variance for c in residual.coordinates])
        return outputs, torch.stack(columns, 1)

    def outputs_and_u_without_each(
        self, residual: Residual, collectors: Sequence[Collector]
    ) -> tuple[Tensor, Tensor]:
        """The same with each input measured by the statistics of all others.

        Rows of a class that has no other example are left out of ``u``: nothing tells how far from
        its class such a row would be.
        """
        without = [collector.without_each() for collector in collectors]
        outputs, y, found = self._run([c.rows_of for c in collectors])
        columns, counted = [], torch.ones_like(y, dtype=torch.bool)
        every: list[Any] = list(residual.coordinates)
        for collector, measure, coordinates, rows in zip(
            collectors, without, every, found, strict=True
        ):
            own = y if collector.needs_classes else torch.zeros_like(y)
            columns.append(measure(rows, own, coordinates.offset))
            counted = counted & measure.counted(own)
        u = torch.stack(columns, 1)
        return outputs, u[counted] if bool(counted.any()) else u

    def _run(self, takes: Sequence[Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs that are no logits, classes, and what was taken from each representation."""
        posterior, likelihood = self.posterior, self.likelihood
        parts, network, (order, pieces) = [], posterior.network, self.x.split(self.batch)
        run_network: Any = network if self.x.form is None else partial(run, network)
        with evaluating(posterior) as modes, modes:
            for x in pieces:
                clone = x.clone() if isinstance(x, Tensor) else copied(x)
                reading = capture(network, self.layers, takes, x)
                with reading, reading:
                    if not isinstance(likelihood, LabelLikelihood):
                        gaussian: Gaussian = posterior(clone)
                        outputs = gaussian.mean
                    else:
                        outputs = outputs_of(run_network(clone), x, posterior.output)
                predicted = likelihood.predicted(outputs)
                # Logits have a unit of their own, and those of many classes are large.
                numbers = outputs[:, :0] if isinstance(likelihood, LabelLikelihood) else outputs
                parts.append((numbers, predicted, *reading.found))
        found = (torch.cat(column)[order] for column in zip(*parts, strict=True))
        numbers, predicted, *columns = found
        return numbers.double(), torch.where(self.y < 0, predicted, self.y), columns


def set_paper_scales(residual: Residual, sample: Sample) -> None:
    """Scales that add little at the data; see :meth:`rgpr.RGPR.fit`."""
    outputs, u = sample.outputs_and_u(residual)
    residual.typical = _typical(u)
    # The first of them are as even a sample as all.
    outputs, u = outputs[:_PAPER_PROBE], u[:_PAPER_PROBE]
    variance = _UNTUNED_VARIANCE * _unit(sample.likelihood, outputs)
    at_data = u.quantile(0.95, dim=0)
    each = variance / len(sample.layers)
    residual.sigma2 = torch.where(at_data > _LEAST, each / at_data, each)
    if not isinstance(sample.likelihood, LabelLikelihood):
        residual.unit = torch.full_like(residual.unit, variance)


def set_onset(
    residual: Residual, sample: Sample, collectors: Sequence[Collector], count: int
) -> None:
    """The typical size of every ``u``, scales in these units, and where the variance sets in."""
    every: list[Any] = list(residual.coordinates)
    units = max(coordinates.joint_units for coordinates in every)
    if count < _ENOUGH * units:
        outputs, u = sample.outputs_and_u_without_each(residual, collectors)
    else:
        outputs, u = sample.outputs_and_u(residual)
    residual.typical = _typical(u)
    onset = residual.strangeness(u).quantile(_ONSET_QUANTILE)
    slope = AT_TWICE_THE_ONSET / onset if float(onset) > 0 else torch.ones_like(onset)
    scales = torch.where(residual.typical > 0, residual.typical, 1.0)
    residual.sigma2 = slope / scales
    assert residual.onset is not None
    residual.onset = slope * onset
    if not isinstance(sample.likelihood, LabelLikelihood):
        variance = _UNTUNED_VARIANCE * _unit(sample.likelihood, outputs)
        residual.unit = torch.full_like(residual.unit, variance)


def _typical(u: Tensor) -> Tensor:
    """The median of each ``u``, or its mean where an offset makes most of them zero; ``(L,)``."""
    median = u.median(0).values
    typical = torch.where(median > 0, median, u.mean(0))
    return torch.where(typical > _LEAST, typical, 0.0)


def _unit(likelihood: Likelihood, outputs: Tensor) -> float:
    """One for logits, else the variance of the outputs."""
    if isinstance(likelihood, LabelLikelihood):
        return 1.0
    return float(outputs.var(0, correction=0).mean()) or 1.0
