"""Classes, as scikit-learn's classifiers name them."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from .base import Array, ResidualEstimator

__all__ = ["RGPRClassifier"]


class RGPRClassifier(ClassifierMixin, ResidualEstimator):
    """A ReLU network whose confidence goes to one over the number of classes far from its data.

    Args:
        network: A trained ``torch.nn.Module`` that takes the columns ``(n, D)`` and returns logits,
            in the order of ``classes_`` (which are sorted). It is neither trained nor copied. By
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
        classes_: The classes, sorted: what the columns of probabilities and sets are.
        n_features_in_: The number of columns.
        feature_names_in_: Their names, if :meth:`fit` was given a frame.
        network_: The network, over columns as they are.
        model_: The :class:`rgpr.RGPR` over it, for everything else that it can do.
        calibration_: What calibrating did, ``None`` without held-out rows; ``print`` it.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = RGPRClassifier(random_state=0).fit(X, y)
        >>> bool(classifier.score(X, y) > 0.9)
        True
        >>> classifier.predict_proba(1e6 * X[:1]).round(2)
        array([[0.33, 0.33, 0.33]])
        >>> bool(classifier.score_samples(10 * X).max() < classifier.score_samples(X).min())
        True
    """

    _likelihood: ClassVar[str] = "classification"
    classes_: Array

    def fit(self, X: Any, y: Any, *, X_val: Any = None, y_val: Any = None) -> Self:
        """Train the network unless it was given, fit the residual, and calibrate.

        Args:
            X: ``(n, D)``, an array or a frame of numbers.
            y: ``(n,)``, numbers or strings.
            X_val: Rows that the network was not trained on, to calibrate with. If ``network`` was
                trained on ``X``, pass such rows: a part of ``X`` would promise too much.
            y_val: Their classes.

        Returns:
            The estimator itself.

        Raises:
            ValueError: A single class, other outputs than classes, values that are not finite, or
                an option that cannot be.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        classes, indices = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(
                f"all of the {len(y)} rows are of one class, {classes.tolist()[0]!r}; a "
                "classifier takes rows of at least two"
            )
        held = None
        if self._own_held(X_val, y_val):
            X_val, y_val = validate_data(self, X_val, y_val, dtype=np.float64, reset=False)
            unknown = np.setdiff1d(y_val, classes)
            if len(unknown):
                raise ValueError(
                    f"y_val has the classes {unknown.tolist()}, which are not in y; leave such "
                    "rows out"
                )
            held = X_val, np.searchsorted(classes, y_val)
        self._fit((X, indices), held, len(classes))
        found = self._of_rows(X[:1]).probabilities
        if found is not None and found.shape[1] != len(classes):
            del self.model_, self.network_, self.calibration_
            raise ValueError(
                f"the network tells {found.shape[1]} classes apart and y has {len(classes)}, "
                f"{classes.tolist()}; pass rows of every class that the network was trained for"
            )
        self.classes_ = classes
        return self

    def predict(self, X: Any) -> Array:
        """The most probable class of each row, ``(n,)``."""
        most_probable = self.predict_proba(X).argmax(1)
        found: Array = self.classes_[most_probable]
        return found

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, ``(n, C)``, in the order of ``classes_``."""
        found = self._answers(X).probabilities
        assert found is not None  # a classification
        return found

    def predict_set(self, X: Any, coverage: float = 0.9) -> Array:
        """Which classes to expect, ``(n, C)`` booleans in the order of ``classes_``.

        For rows like the held-out ones the right class is in the set with at least this
        probability, on average. Far away every class is in it.

        Raises:
            ValueError: A coverage that is no share, or no held-out rows.
        """
        self._check_promise(coverage)
        found = self._answers(X, coverage).set
        assert found is not None  # calibrated with labels
        return found

    def predict_frame(self, X: Any, coverage: float = 0.9, alpha: float = 0.05) -> Any:
        """Everything as one pandas frame, with the index of ``X`` if it is a frame.

        The columns are ``prediction``, ``probabilities_A`` for every class ``A``,
        ``score_samples`` and, with held-out rows, ``p_value``, ``flag`` and ``set_A``.

        Args:
            X: Rows as for :meth:`fit`.
            coverage: The probability that a set holds the right class.
            alpha: Rows with a p-value of at most this are flagged: at most this share of rows like
                the held-out ones.
        """
        import pandas as pd  # type: ignore[import-untyped]

        last, found, index = self._predict_frame(X, coverage, alpha)
        assert found.probabilities is not None  # a classification
        columns = {"prediction": self.classes_[found.probabilities.argmax(1)]}
        columns |= self._by_class("probabilities", found.probabilities) | last
        if found.set is not None:
            columns |= self._by_class("set", found.set)
        return pd.DataFrame(columns, index=index)

    def _by_class(self, name: str, values: Array) -> dict[str, Array]:
        return {f"{name}_{label}": values[:, i] for i, label in enumerate(self.classes_)}

    @staticmethod
    def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    def _needed(self, y: Array, held: Array) -> Array:
        """One row of every class that would be held out as a whole."""
        lacking = np.setdiff1d(y[held], y[~held])
        return np.array([np.flatnonzero(y == label)[0] for label in lacking], dtype=int)
