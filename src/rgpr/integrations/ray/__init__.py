"""Past one machine: fitting, calibrating and scoring over Ray Data.

``score`` maps a saved model over a data set. ``score_files`` does so file by file and goes on where
a killed run stopped. ``fit`` and ``calibrate`` learn from a data set by states of its parts, which
are merged.
"""

from .files import score_files
from .learning import calibrate, fit
from .scoring import Predictor, score

__all__ = ["Predictor", "calibrate", "fit", "score", "score_files"]
