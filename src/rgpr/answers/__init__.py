"""What a model says about an input, beside its probabilities.

``score`` says how strange an input is. ``conformal`` turns scores of held-out data into promises
that hold for any number of examples: p-values, flags, sets of classes and intervals.
``calibration`` reads held-out data once and sets what depends on it.
"""

from .calibration import Calibration
from .explanation import Explanation

__all__ = ["Calibration", "Explanation"]
