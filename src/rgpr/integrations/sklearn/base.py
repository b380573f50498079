"""What the classifier and the regressor have in common."""

from __future__ import annotations

import math
import warnings
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from ...answers import Calibration, Predictions, conformal
from ...model import RGPR
from .training import Training

__all__ = ["Array", "ResidualEstimator"]

Array = np.ndarray[Any, Any]

try:
    _VERSION = version("rgpr")
except PackageNotFoundError:  # run from its source
    _VERSION = "unknown"


class ResidualEstimator(BaseEstimator):
    """A network below the residual; see the subclasses."""

    _likelihood: ClassVar[str]
    n_features_in_: int
    network_: nn.Module
    model_: RGPR
    calibration_: Calibration | None

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        hidden_layer_sizes: tuple[int, ...] = (64, 64),
        epochs: int = 100,
        learning_rate: float = 0.003,
        batch_size: int = 64,
        weight_decay: float = 1.0,
        validation_fraction: float = 0.2,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.hidden_layer_sizes = hidden_layer_sizes
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def score_samples(self, X: Any) -> Array:
        """How ordinary each row is, ``(n,)``: higher is more ordinary, lower is stranger.

        This is scikit-learn's sign, that of ``IsolationForest`` and ``KernelDensity``, and the
        negative of :meth:`rgpr.RGPR.score`.
        """
        return -self._answers(X).score

    def _predict_frame(
        self, X: Any, coverage: float, alpha: float
    ) -> tuple[dict[str, Array], Predictions, Any]:
        """Columns that both kinds of estimators have, all answers, and the index of ``X``."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha}; expected a share of ordinary rows, such as 0.05")
        found = self._answers(X, coverage)
        last = {"score_samples": -found.score}
        if found.p_value is not None and self.calibration_ is not None:
            held, needed = self.calibration_.examples, conformal.references_for(alpha)
            if held < needed:
                warnings.warn(
                    f"alpha={alpha} takes {needed} held-out rows and there were {held}, so no row "
                    "can be flagged; fit with more rows, with a larger validation_fraction, or "
                    "give a larger alpha",
                    stacklevel=3,
                )
            last |= {"p_value": found.p_value, "flag": found.p_value <= alpha}
        return last, found, X.index if hasattr(X, "iloc") else None

    # -- fitting ---------------------------------------------------------------------------------

    def _fit(
        self, rows: tuple[Array, Array], held: tuple[Array, Array] | None, outputs: int
    ) -> Self:
        """Train a network unless one was given, then fit the residual and calibrate it.

        Args:
            rows: Inputs and targets of the fit.
            held: Those that the user held out, if so.
            outputs: How many outputs a network has that is trained here.
        """
        random = check_random_state(self.random_state)
        training = self._training(int(random.randint(np.iinfo(np.int32).max)))
        if held is None:
            rows, held = self._split(*rows, random)
            if self.network is not None and len(held[0]):
                warnings.warn(
                    "network= was trained before: if it has seen any of these rows, p-values, sets "
                    "and intervals promise too much. Pass X_val= and y_val= with rows that it has "
                    "not seen, or validation_fraction=0 for no promises",
                    stacklevel=3,
                )
        X, y = rows
        network = self.network
        if network is None:
            network = training.train(torch.tensor(X), torch.tensor(y), outputs)
        model = RGPR(network, likelihood=self._likelihood).fit(X, y, progress=False)
        calibration = None
        if len(held[0]):
            with warnings.catch_warnings():
                # Copies of a row are no mistake here, and how many rows were held out is said
                # where it matters. The report has the notes.
                warnings.simplefilter("ignore", UserWarning)
                calibration = model.calibrate(*held, progress=False)
        self.network_, self.model_, self.calibration_ = network, model, calibration
        return self

    def _training(self, seed: int) -> Training:
        if self.network is not None and not isinstance(self.network, nn.Module):
            raise TypeError(
                f"network is a {type(self.network).__name__}; pass a trained torch.nn.Module over "
                "the columns, or None for one that is trained here"
            )
        hidden = self.hidden_layer_sizes
        hidden = (hidden,) if isinstance(hidden, Integral) else tuple(hidden)
        if not all(isinstance(width, Integral) and width > 0 for width in hidden):
            raise ValueError(
                f"hidden_layer_sizes={self.hidden_layer_sizes!r}; expected widths such as (64, 64)"
            )
        for name in ("epochs", "batch_size"):
            _check(name, getattr(self, name), Integral, 1, "a whole number of 1 or more")
        _check("learning_rate", self.learning_rate, Real, 1e-300, "a positive number")
        _check("weight_decay", self.weight_decay, Real, 0, "a number that is not negative")
        return Training(
            tuple(int(width) for width in hidden),
            int(self.epochs),
            float(self.learning_rate),
            int(self.batch_size),
            float(self.weight_decay),
            seed,
            self._loss,
        )

    @staticmethod
    def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _split(
        self, X: Array, y: Array, random: Any
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Rows of the fit, and rows that are held out; at least two are left for the fit."""
        share = self.validation_fraction
        if not isinstance(share, Real) or not 0 <= share < 1:
            raise ValueError(
                f"validation_fraction={share!r}; expected a share of the rows, from 0 (no "
                "calibration) to below 1"
            )
        count = max(1, round(float(share) * len(X))) if share else 0
        order = random.permutation(len(X))
        count = max(0, min(count, len(X) - 2))
        held = np.zeros(len(X), dtype=bool)
        held[order[:count]] = True
        held[self._needed(y, held)] = False
        return (X[~held], y[~held]), (X[held], y[held])

    def _needed(self, y: Array, held: Array) -> Array:
        """Numbers of held-out rows that the fit cannot do without; here there are none."""
        return np.zeros(0, dtype=int)

    def _own_held(self, X_val: Any, y_val: Any) -> bool:
        """Whether the user held rows out; both parts or none are given."""
        if (X_val is None) != (y_val is None):
            missing = "y_val" if y_val is None else "X_val"
            raise ValueError(f"{missing} is missing: pass X_val and y_val together, or neither")
        return X_val is not None

    # -- answers ---------------------------------------------------------------------------------

    def _answers(self, X: Any, coverage: float = 0.9) -> Predictions:
        check_is_fitted(self)
        return self._of_rows(validate_data(self, X, dtype=np.float64, reset=False), coverage)

    def _of_rows(self, X: Array, coverage: float = 0.9) -> Predictions:
        """All answers for rows that were looked at."""
        # Flags are not asked for; at this level no number of references is too small.
        held = 1 if self.calibration_ is None else self.calibration_.examples
        return self.model_.predict(X, alpha=1 / (held + 1), coverage=coverage, progress=False)

    def _check_promise(self, coverage: float) -> None:
        """Refuse to promise without held-out rows, and warn where they are too few."""
        check_is_fitted(self)
        if self.calibration_ is None:
            raise ValueError(
                f"no rows were held out (validation_fraction={self.validation_fraction!r}), so "
                "that nothing can be promised; fit again with a validation_fraction of e.g. 0.2 "
                "and more than two rows, or pass X_val and y_val to fit"
            )
        needed = math.ceil(coverage / (1 - coverage) - 1e-9) if 0 < coverage < 1 else 0
        if self.calibration_.examples < needed:
            warnings.warn(
                f"coverage={coverage} takes {needed} held-out rows and there were "
                f"{self.calibration_.examples}, so the answer holds everything; fit with more "
                "rows, with a larger validation_fraction, or ask for less",
                stacklevel=3,
            )

    # -- copies and pickles ----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rgpr_version": _VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        theirs = state.pop("_rgpr_version", "unknown")
        if theirs != _VERSION:
            warnings.warn(
                f"this {type(self).__name__} was pickled by rgpr {theirs} and is loaded by "
                f"{_VERSION}, which may answer differently or not at all; fit it again, or "
                "keep model_.save(path), whose files later versions read",
                stacklevel=2,
            )
        super().__setstate__(state)


def _check(name: str, value: Any, kind: type, least: float, wanted: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}; expected {wanted}")
