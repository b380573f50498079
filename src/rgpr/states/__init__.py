"""What fitting and calibrating learn from some of the data, to be saved and merged with the rest.

``base`` is what both have in common: a model, a file, and the refusal of what was made for another
model.
"""

from .calibration_state import CalibrationState
from .fit_state import FitState

__all__ = ["CalibrationState", "FitState"]
