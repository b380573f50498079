"""Looking at a model as its users will: how good its answers are, and whether inputs have changed.

:func:`rgpr.evaluate` measures calibration and detection of a model beside its base and other
detectors, from one pass over each set of data.
"""

from .evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
