"""Choosing ``sigma2`` (and a temperature) from data, without running the network again.

``options`` is what a user asked for. An objective (``objectives/``, one file each) reads the data
in one pass; ``space`` says where to look, ``search`` climbs by means of ``optimize``, ``budget``
chooses the weight of the outliers, and ``report`` says what came of it. ``run`` is all of this in
order, for :meth:`rgpr.RGPR.tune`.
"""

from .objectives import Objective, PerExample
from .options import Options
from .result import TuningResult

__all__ = ["Objective", "Options", "PerExample", "TuningResult"]
