"""Numbers, as scikit-learn's regressors predict them."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from .base import Array, ResidualEstimator

__all__ = ["RGPRRegressor"]


class RGPRRegressor(MultiOutputMixin, RegressorMixin, ResidualEstimator):
    """A ReLU network whose intervals grow without bound far from its data.

    Args:
        network: A trained ``torch.nn.Module`` that takes the columns ``(n, D)`` and returns
            numbers ``(n, C)`` in the unit of the targets. It is neither trained nor copied. By
            default a network is trained by :meth:`fit`, and the next five options say how.
        hidden_layer_sizes: Widths of the hidden layers.
        epochs: Passes over the rows.
        learning_rate: Of AdamW at the start; it falls to zero along a cosine.
        batch_size: Rows of one step.
        weight_decay: Of AdamW.
        validation_fraction: The share of the rows that is held out to calibrate with; 0 for no
            calibration. It is not used if :meth:`fit` is given held-out rows.
        random_state: Seed of the split, of the weights and of the order of rows: a number, a
            ``numpy.random.RandomState``, or ``None``, which gives another result each time.

    Attributes:
        n_features_in_: The number of columns.
        feature_names_in_: Their names, if :meth:`fit` was given a frame.
        network_: The network, over columns as they are.
        model_: The :class:`rgpr.RGPR` over it, for everything else that it can do.
        calibration_: What calibrating did, ``None`` without held-out rows; ``print`` it.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = RGPRRegressor(epochs=20, random_state=0).fit(X, y)
        >>> low, high = regressor.predict_interval(X, coverage=0.9)
        >>> bool(((low <= y) & (y <= high)).mean() > 0.85)
        True
        >>> further_low, further_high = regressor.predict_interval(1e3 * X)
        >>> bool((further_high - further_low).min() > (high - low).max())
        True
    """

    _likelihood: ClassVar[str] = "regression"

    def fit(self, X: Any, y: Any, *, X_val: Any = None, y_val: Any = None) -> Self:
        """Train the network unless it was given, fit the residual, and calibrate.

        Args:
            X: ``(n, D)``, an array or a frame of numbers.
            y: ``(n,)``, or ``(n, C)`` for several numbers at once.
            X_val: Rows that the network was not trained on, to calibrate with. If ``network`` was
                trained on ``X``, pass such rows: a part of ``X`` would promise too much.
            y_val: Their targets.

        Returns:
            The estimator itself.

        Raises:
            ValueError: Values that are not finite, targets that do not fit the network, or an
                option that cannot be.
        """
        options: dict[str, Any] = {"dtype": np.float64, "y_numeric": True, "multi_output": True}
        X, y = validate_data(self, X, y, ensure_min_samples=2, **options)
        flat = y.ndim == 1
        held = None
        if self._own_held(X_val, y_val):
            X_val, y_val = validate_data(self, X_val, y_val, reset=False, **options)
            held = X_val, _columns(y_val)
        self._fit((X, _columns(y)), held, _columns(y).shape[1])
        self._flat = flat
        return self

    def predict(self, X: Any) -> Array:
        """The mean of each row, of the shape that the targets had."""
        found = self._answers(X).mean
        assert found is not None  # a regression
        return self._shaped(found)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper bounds of the target, each of the shape that targets had.

        For rows like the held-out ones the target lies between them with at least this
        probability, on average; of several numbers all do at once. Far away they grow without
        bound.

        Raises:
            ValueError: A coverage that is no share, or no held-out rows.
        """
        self._check_promise(coverage)
        found = self._answers(X, coverage).interval
        assert found is not None  # calibrated with targets
        return self._shaped(found[0]), self._shaped(found[1])

    def predict_frame(self, X: Any, coverage: float = 0.9, alpha: float = 0.05) -> Any:
        """Everything as one pandas frame, with the index of ``X`` if it is a frame.

        The columns are ``prediction``, ``score_samples`` and, with held-out rows, ``p_value``,
        ``flag``, ``low`` and ``high``; several numbers have ``prediction_0``, ``low_0`` and so on.

        Args:
            X: Rows as for :meth:`fit`.
            coverage: The probability that an interval holds the target.
            alpha: Rows with a p-value of at most this are flagged: at most this share of rows like
                the held-out ones.
        """
        import pandas as pd  # type: ignore[import-untyped]

        last, found, index = self._predict_frame(X, coverage, alpha)
        assert found.mean is not None  # a regression
        columns = self._named("prediction", found.mean) | last
        if found.interval is not None:
            columns |= self._named("low", found.interval[0])
            columns |= self._named("high", found.interval[1])
        return pd.DataFrame(columns, index=index)

    def _named(self, name: str, values: Array) -> dict[str, Array]:
        if self._flat:
            return {name: values[:, 0]}
        return {f"{name}_{i}": values[:, i] for i in range(values.shape[1])}

    def _shaped(self, values: Array) -> Array:
        return values[:, 0] if self._flat else values

    @staticmethod
    def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(outputs, targets)


def _columns(y: Array) -> Array:
    y = np.asarray(y, dtype=np.float64)
    return y[:, None] if y.ndim == 1 else y
