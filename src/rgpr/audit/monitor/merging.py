r"""What several processes found together, each with a monitor of its own.

Monitors that share the references of one model are **not independent**: where these references lie
low, all processes see small p-values. So

- the *product* of their martingales promises nothing;
- the *average* :math:`\bar M = \frac1N \sum_i M_i` has an expectation of at most 1 whatever the
  dependence, so :math:`P(\bar M \ge 1/\alpha) \le \alpha` when it is looked at **once, at a moment
  fixed beforehand**. It is no martingale of all processes together: to those who see another
  process's inputs, the next p-value of this one is not uniform. So Ville's inequality does not say
  that the average never reaches :math:`1/\alpha`;
- the *largest* martingale against :math:`N / \alpha`: each reaches that at any time with a
  probability of at most :math:`\alpha / N`, and probabilities add up, so **the chance of ever
  raising a false alarm is at most** :math:`\alpha`, whatever the dependence and the clocks of the
  processes.

The merged alarm is the last. It loses little: :math:`\bar M` exceeds :math:`\max_i M_i / N` by a
factor of ``N`` at most. Where all inputs can be sent to one place, one monitor that reads all of
them is valid too, and sees more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .martingale import Martingale

__all__ = ["Merged", "merged"]


@dataclass(frozen=True)
class Merged:
    """What several monitors found together; ``print`` it.

    Attributes:
        processes: How many there are.
        count: How many inputs they read together.
        alarm: Whether one of them ever reached ``N / alpha``: valid at all times.
        raised_by: Which of them did, counted from 0 in the order they were given.
        log10_largest: The logarithm to base 10 of the largest martingale that any of them ever had,
            divided by ``N``; the alarm is raised at ``log10(1 / alpha)``.
        log10_average: That of the average of their martingales now: valid for one look, at a moment
            fixed beforehand.
        drifted: Layers whose martingale ever reached ``N L / alpha`` in one of them.
    """

    processes: int
    count: int
    alarm: bool
    raised_by: tuple[int, ...]
    log10_largest: float
    log10_average: float
    drifted: tuple[str, ...]

    def __str__(self) -> str:
        which = "process" if len(self.raised_by) == 1 else "processes"
        raised = f"ALARM by {which} {', '.join(map(str, self.raised_by))}"
        found = raised if self.alarm else "no alarm"
        layers = f"; drifted layers: {', '.join(self.drifted)}" if self.drifted else ""
        return f"{found} after {self.count} inputs in {self.processes} processes{layers}"


def merged(martingales: list[Martingale], layers: list[str]) -> Merged:
    """The finding of all; the score comes first in every martingale, then the layers.

    Args:
        martingales: One for each process, with the same limits.
        layers: Names of the layers.
    """
    size = math.log(len(martingales))
    peaks = np.stack([each.peak - size for each in martingales])
    reached = peaks >= martingales[0].limits
    now = np.array([each.log[0] for each in martingales])
    average = float(np.logaddexp.reduce(now)) - size
    drifted = [name for column, name in enumerate(layers, 1) if reached[:, column].any()]
    return Merged(
        processes=len(martingales),
        count=sum(int(each.count[0]) for each in martingales),
        alarm=bool(reached[:, 0].any()),
        raised_by=tuple(np.flatnonzero(reached[:, 0]).tolist()),
        log10_largest=float(peaks[:, 0].max()) / math.log(10),
        log10_average=average / math.log(10),
        drifted=tuple(drifted),
    )
