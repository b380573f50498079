"""From statistics of the training inputs to the residual, and one call that does both.

A sample of the inputs is kept with the statistics, by which the scales are set: see
:mod:`rgpr.extension.scales`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._network import batches
from .._network.kept import Kept
from .._network.processes import active, together
from .._network.representation import Representation
from ..residual.variance import Residual
from .scales import Sample, set_onset, set_paper_scales
from .statistics import Statistics

__all__ = ["Fitted", "fit"]


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes:
        layers: The representations, the input first.
        shape: Shape of one input.
        residual: The residual.
        keys: Keys of the sample of training inputs, see :func:`rgpr._network.reservoir.row_keys`.
        count: How many training inputs there were.
        outputs: How many outputs the base has.
        labelled: Whether any batch had targets.
    """

    layers: list[Representation]
    shape: batches.Shape
    residual: Residual
    keys: Tensor
    count: int
    outputs: int
    labelled: bool


def fit(
    seen: Statistics, train_loader: Iterable[Any] | None, *, r: float = 1.0, progress: bool = True
) -> Fitted:
    """Learn a residual from training data; see :meth:`rgpr.RGPR.fit`.

    Args:
        seen: Statistics of data that were read before, or of none.
        train_loader: More data, or ``None``.
        r: Factor on the standard deviations.
        progress: Show a progress bar where there is a terminal.
    """
    if not 0 < r < torch.inf:
        raise ValueError(f"r = {r} must be positive and finite: it scales standard deviations")

    def read() -> dict[str, Any]:
        if train_loader is not None:
            seen.read(train_loader, progress)
        seen.finish()
        return seen.state() if active() else {}

    shards = together(read, seen.device)
    if len(shards) > 1:
        seen = Statistics(seen.plan)
        for shard in shards:
            seen.merge(shard)
    if seen.probe.seen < 2:
        raise ValueError(
            "the data, or the state, have fewer than two inputs; nothing can be standardised"
        )
    plan, layers, collectors, probe = seen.plan, seen.layers, seen.collectors, seen.probe
    for collector in collectors:
        collector.r = r
    residual = Residual([c.finish() for c in collectors], combine=plan.recipe.combine)
    keys, *columns, y = (t.to(residual.sigma2.device) for t in probe.state["rows"])
    # In batches that the network is known to take.
    sample = Sample(
        plan.posterior, plan.likelihood, layers, Kept(seen.form, columns), y, seen.largest
    )
    if plan.recipe.combine == "sum":
        set_paper_scales(residual, sample)
    else:
        set_onset(residual, sample, collectors, probe.seen)
    return Fitted(
        layers, seen.shape, residual, keys, probe.seen, seen.outputs, True in seen.labelled
    )
