"""Looking at a model as its users will: how good its answers are, and whether inputs have changed.

:func:`rgpr.evaluate` measures calibration and detection of a model beside its base and other
detectors, from one pass over each set of data. :func:`rgpr.audit.audit` makes a report of it, one
HTML file to look at and to pass on. :class:`rgpr.Monitor` watches a model that is at work.
"""

from .evaluate import Evaluation, evaluate
from .monitor import LayerDrift, Merged, Monitor, Status, Window
from .report import Report, audit

__all__ = [
    "Evaluation",
    "LayerDrift",
    "Merged",
    "Monitor",
    "Report",
    "Status",
    "Window",
    "audit",
    "evaluate",
]
