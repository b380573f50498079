"""Choosing ``sigma2`` (and a temperature) from data, without running the network again.

``options`` is what a user asked for. An objective (``objectives/``, one file each) reads the data
in one pass; ``space`` says where to look, ``search`` climbs by means of ``optimize``, ``budget``
chooses the weight of the outliers, and ``report`` says what came of it. ``run`` is all of this in
order, for :meth:`rgpr.RGPR.tune`.
"""

from ..answers.examples import Examples, Parameters
from .objectives import Data, Objective, PerExample
from .options import Options
from .result import TuningResult

__all__ = [
    "Data",
    "Examples",
    "Objective",
    "Options",
    "Parameters",
    "PerExample",
    "TuningResult",
]
