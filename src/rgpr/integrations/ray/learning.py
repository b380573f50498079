"""Fitting and calibrating past one machine: states of parts of a Ray dataset, merged in order.

An actor makes a state of the rows that it gets at a time, and gives it away as the bytes of the
state's file. It keeps nothing, so if it is lost, Ray runs the same rows again elsewhere and nothing
counts twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..._network.checks import check_counts
from ..._text import said
from ...answers import Calibration
from ...model import RGPR
from ...states import CalibrationState, FitState
from ...states.base import State
from .columns import Array, Inputs, Workers, numbers

__all__ = ["Learner", "calibrate", "fit"]

S = TypeVar("S", bound=State)
# Errors that data cause, by name.
_REFUSED = {error.__name__: error for error in (KeyError, TypeError, ValueError)}


class Learner:
    """Makes a state of every batch of columns, for ``map_batches``.

    Args:
        kind: The class of the state.
        model: The model.
        inputs: How inputs are made of a column.
        target: Name of the targets, if there are any.
        batch_size: Rows that go through the network together.
    """

    def __init__(
        self,
        kind: type[State],
        model: RGPR,
        inputs: Inputs,
        target: str | None,
        batch_size: int,
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.kind, self.model = kind, model.to(self.device)
        self.inputs, self.target, self.batch_size = inputs, target, batch_size

    def __call__(self, batch: dict[str, Array]) -> dict[str, Any]:
        """The state of a batch of columns as bytes, or why there is none: a word and a sentence."""
        try:
            found = self._state_of(batch), "", ""
        except tuple(_REFUSED.values()) as error:
            # What a worker raises reaches the caller as another kind of error.
            kind = next(name for name, each in _REFUSED.items() if isinstance(error, each))
            found = b"", kind, said(error)
        return {
            name: np.array([value], dtype=object)
            for name, value in zip(("state", "kind", "reason"), found, strict=True)
        }

    def _state_of(self, batch: dict[str, Array]) -> bytes:
        state, network = self.kind(self.model), self.model.posterior.network
        rows = len(next(iter(batch.values())))
        for start in range(0, rows, self.batch_size):
            part = {name: array[start : start + self.batch_size] for name, array in batch.items()}
            x = self.inputs.of(part, network, self.device)
            # With a bracket around it, so that no target is looked for among several inputs.
            y = None
            if self.target is not None:
                y = numbers(part, self.target, "name the targets with target=")
            state.update((x, y))
        with TemporaryDirectory() as folder:
            state.save(Path(folder) / "state")
            return (Path(folder) / "state").read_bytes()


def fit(
    model: RGPR,
    dataset: Any,
    *,
    column: str = "x",
    target: str | None = None,
    scale: float = 1.0,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    r: float = 1.0,
    batch_size: int = 512,
    rows_per_state: int = 8192,
    actors: int | tuple[int, int] = 1,
    gpus: float = 0.0,
    cpus: float = 1.0,
) -> RGPR:
    """:meth:`rgpr.RGPR.fit` on a dataset, by many workers.

    Args:
        model: The model; workers get copies of it.
        dataset: A ``ray.data.Dataset`` with a column of arrays.
        column: Name of the inputs.
        target: Name of the targets; without them the network's own predictions are taken.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        preprocess: What is done to a batch of inputs after that; see :class:`Predictor`.
        r: Factor on the standard deviations.
        batch_size: Rows that go through the network together.
        rows_per_state: Rows that become one state, and that a worker holds at a time. A state may
            hold 512 of them, which travel to the process that calls this.
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.

    Returns:
        The model itself, which is that of one process over all rows up to rounding.

    Raises:
        KeyError: The dataset has no such column.
        TypeError: A column holds no numbers, or what :meth:`rgpr.RGPR.fit` refuses.
        ValueError: What :meth:`rgpr.RGPR.fit` refuses.
    """
    check_counts(batch_size=batch_size, rows_per_state=rows_per_state)
    inputs = Inputs(column, scale, preprocess, model.input is not None)
    workers = Workers(actors, gpus, cpus)
    workers.leave_room()
    options = {"inputs": inputs, "target": target, "batch_size": batch_size}
    return model.fit(_learned(FitState(model), dataset, workers, rows_per_state, options), r=r)


def calibrate(
    model: RGPR,
    dataset: Any,
    *,
    column: str = "x",
    target: str | None = None,
    scale: float = 1.0,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    max_nll_increase: float = 0.005,
    batch_size: int = 512,
    rows_per_state: int = 8192,
    actors: int | tuple[int, int] = 1,
    gpus: float = 0.0,
    cpus: float = 1.0,
) -> Calibration:
    """:meth:`rgpr.RGPR.calibrate` with a dataset, by many workers; see :func:`fit`.

    Args:
        model: The fitted model; workers get copies of it.
        dataset: A ``ray.data.Dataset`` with a column of arrays, held out from training.
        column: Name of the inputs.
        target: Name of the targets, if there are any.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        preprocess: What is done to a batch of inputs after that; see :class:`Predictor`.
        max_nll_increase: How much the mean negative log-likelihood may rise above the base's.
        batch_size: Rows that go through the network together.
        rows_per_state: Rows that become one state, and that a worker holds at a time.
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.

    Returns:
        What was done; ``print`` it.

    Raises:
        KeyError: The dataset has no such column.
        RuntimeError: The model was not fitted.
        TypeError: A column holds no numbers, or what :meth:`rgpr.RGPR.calibrate` refuses.
        ValueError: What :meth:`rgpr.RGPR.calibrate` refuses.
    """
    check_counts(batch_size=batch_size, rows_per_state=rows_per_state)
    inputs = Inputs(column, scale, preprocess, model.input is not None)
    workers = Workers(actors, gpus, cpus)
    workers.leave_room()
    options = {"inputs": inputs, "target": target, "batch_size": batch_size}
    state = _learned(CalibrationState(model), dataset, workers, rows_per_state, options)
    return model.calibrate(state, max_nll_increase=max_nll_increase)


def _learned(total: S, dataset: Any, workers: Workers, rows: int, options: dict[str, Any]) -> S:
    """A state with those of all rows of a data set merged into it, in the order of the rows."""
    # A worker may have no GPU to unpack a model of a GPU on.
    model = copy.deepcopy(total.model).cpu()
    states = workers.map(dataset, Learner, rows, kind=type(total), model=model, **options)
    with TemporaryDirectory() as folder, _in_order(states):
        path = Path(folder) / "state"
        for row in states.iter_rows():
            if row["kind"]:
                raise _REFUSED[row["kind"]](
                    f"{row['reason']} (batches are counted from the first of every {rows} rows)"
                )
            path.write_bytes(row["state"])
            total.add(path)
    return total


@contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Rows come in the order of the data, and not as workers finish: sums round the same."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
