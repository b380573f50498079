"""What :meth:`rgpr.RGPR.fit` learns from training data, as a state that can be merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._network.batches import Batch
from ..extension.statistics import Statistics
from .base import State
from .checks import check_choice, check_fit
from .identity import of_model

__all__ = ["FitState"]


class FitState(State):
    """What :meth:`rgpr.RGPR.fit` learns from training inputs, as a state that can be merged.

    It holds sums over the inputs and an even sample of 512 of them. ``model.fit(state)`` gives the
    model that ``model.fit(data)`` gives for all the data that the state has seen, up to rounding,
    in whatever parts and order they came. Where copies of an input came in several parts and there
    are more than 512 inputs, the sample may be another one, with the same shares.

    Data cannot be taken out again: the sums would keep rounding of it, and the sample does not know
    which inputs it passed over in its favour.

    Args:
        model: The model; it need not be fitted, and stays as it is.

    Example:
        >>> import torch, rgpr
        >>> from torch import nn
        >>> model = rgpr.RGPR(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3)))
        >>> here, there = torch.randn(64, 2), torch.randn(32, 2)
        >>> first, second = rgpr.FitState(model).update(here), rgpr.FitState(model).update(there)
        >>> first.merge(second)
        FitState(96 inputs)
        >>> model.fit(first).layers
        ['input', '1']
    """

    kind = "a fit state"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._statistics = Statistics(model._plan())

    @property
    def seen(self) -> int:
        return self._statistics.probe.seen

    def statistics_for(self, model: Any) -> Statistics:
        """The statistics, if they are of this model."""
        self._check_model(model)
        if model is self.model:
            return self._statistics
        state, own = self._state(history=False), Statistics(model._plan())
        check_choice("the state", state, own.plan)
        own.merge(state)
        return own

    def _take_in(self, x: Batch, target: Tensor | None) -> None:
        self._statistics.update(x, target)

    def _merge(self, state: Mapping[str, Any]) -> None:
        self._statistics.merge(state)

    def _state(self, history: bool) -> dict[str, Any]:
        return self._statistics.state(history)

    def _check(self, state: Mapping[str, Any], path: str) -> None:
        check_fit(state, self._statistics.plan)

    def _check_choice(self, state: Mapping[str, Any], what: str) -> None:
        check_choice(what, state, self._statistics.plan)

    @staticmethod
    def _identity(model: Any) -> dict[str, Any]:
        return of_model(model)

    def __repr__(self) -> str:
        return f"FitState({self.seen} inputs)"
