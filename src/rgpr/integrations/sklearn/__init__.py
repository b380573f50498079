"""Estimators for scikit-learn: a ReLU network for tables that knows what it has not seen.

They need scikit-learn 1.6 or newer: ``pip install '.[sklearn]'``.

**Trained inside or given.** Without ``network`` a small ReLU network is trained on the rows that
:meth:`fit` gets. With one that is trained already, only the residual is fitted and calibrated.

**Scaling.** Columns are standardised while the network is trained, and so are the targets of a
regression. Both scalings are then folded into the first and the last layer, so ``network_`` takes
the columns as they are, and no scaler is needed in a pipeline. A given network is used as it is.

**Held-out rows.** A share of the rows, ``validation_fraction``, is kept from training, because
:meth:`rgpr.RGPR.calibrate` needs rows that the network has not seen. Nothing is chosen by them, so
the promises of sets and intervals hold. Rows of your own are passed as ``X_val`` and ``y_val``.

**Arrays and frames.** Frames are taken as inputs, and their columns are compared with those of the
fit, as everywhere in scikit-learn. Predictions are numpy arrays, as everywhere there; the method
``predict_frame`` gives all answers as one pandas frame with the index of its input.

**Files.** An estimator may be pickled, copied and sent to other processes. A pickle runs code when
it is loaded, so load none that you do not trust. ``estimator.model_.save(path)`` writes a file that
holds no code.
"""

from .classifier import RGPRClassifier
from .regressor import RGPRRegressor

__all__ = ["RGPRClassifier", "RGPRRegressor"]
