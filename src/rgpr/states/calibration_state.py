"""What :meth:`rgpr.RGPR.calibrate` learns from held-out data, as a state that can be merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._network.batches import Batch
from ..answers.calibration import held_out
from ..answers.conformal import MOST_REFERENCES
from ..answers.examples import Shard
from .base import State
from .checks import check_calibration
from .identity import of_fitted

__all__ = ["CalibrationState"]


class CalibrationState(State):
    """What :meth:`rgpr.RGPR.calibrate` learns from held-out data, as a state that can be merged.

    It holds what the model says of each example, and its target; of more than 100 000 examples an
    even sample. ``model.calibrate(state)`` does what ``model.calibrate(data)`` does for all the
    data that the state has seen, in whatever parts and order they came.

    Args:
        model: The fitted model; it stays as it is.

    Raises:
        RuntimeError: The model was not fitted.
    """

    kind = "a calibration state"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._shard = held_out(model._as_given(), model._fitted_on)

    @property
    def seen(self) -> int:
        return 0 if self._shard.kept is None else self._shard.kept.seen

    def shard_for(self, model: Any, progress: bool = True) -> Shard:
        """The examples for this model as the fit or the user left it, if they are of this model."""
        self._check_model(model)
        own = held_out(model._as_given(), model._fitted_on, progress)
        own.merge(self._shard.state())
        return own

    def _identified(self) -> dict[str, Any]:
        if self._made_for is None:  # the model may have been fitted again since this was made
            self._shard = held_out(self.model._as_given(), self.model._fitted_on)
        return super()._identified()

    def _take_in(self, x: Batch, target: Tensor | None) -> None:
        self._shard.update(x, target)

    def _merge(self, state: Mapping[str, Any]) -> None:
        self._shard.merge(state)

    def _state(self, history: bool) -> dict[str, Any]:
        return self._shard.state(history)

    def _check(self, state: Mapping[str, Any], path: str) -> None:
        check_calibration(state, self._shard.extension, MOST_REFERENCES)

    @staticmethod
    def _identity(model: Any) -> dict[str, Any]:
        return of_fitted(model)

    def __repr__(self) -> str:
        return f"CalibrationState({self.seen} inputs)"
