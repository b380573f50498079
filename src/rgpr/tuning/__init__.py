"""Choosing ``sigma2`` (and a temperature) from data, without running the network again.

``outputs`` keeps what one pass through the network says about each example; ``likelihood``,
``ood`` and ``marginal`` are the paper's three objectives; ``optimize`` climbs any of them;
``budget`` chooses the weight of the outliers; ``result`` says what came of it; ``run`` ties them
together for :meth:`rgpr.RGPR.tune`.
"""

from .result import TuningResult

__all__ = ["TuningResult"]
