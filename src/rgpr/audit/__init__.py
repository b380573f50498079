"""Looking at a model as its users will: how good its answers are, and whether inputs have changed.

:func:`rgpr.evaluate` measures calibration and detection of a model beside its base and other
detectors, from one pass over each set of data. :func:`rgpr.audit.audit` makes a report of it, one
HTML file to look at and to pass on. :class:`rgpr.Monitor` watches a model that is at work.

For the command line, ``data`` reads arrays, tables and image folders, one file for each form;
``networks`` and ``programs`` read networks and run no code that the user did not name; ``answers``
says what is known of a batch, ``streaming`` and ``parts`` write it in chunks that a killed run
takes up, and ``joining`` makes one file of them; ``graphs`` writes a model with its network inside.
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
