"""What a model says about an input.

``probabilities`` makes an answer of one pass through the network, and says what rows get that are
too far away for numbers. ``score`` says how strange an input is. ``conformal`` turns scores of
held-out data into promises that hold for any number of examples: p-values, flags, sets of classes
and intervals. ``calibration`` reads held-out data once and chooses what depends on them;
``examples`` is what is kept of such data. ``explanation`` says which layer found an input strange,
and ``predictions`` gives all answers for many inputs at once.
"""

from .calibration import Calibration
from .explanation import Explanation
from .predictions import Predictions

__all__ = ["Calibration", "Explanation", "Predictions"]
