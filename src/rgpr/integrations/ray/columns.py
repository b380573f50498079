"""What becomes of a column of a data set before a network sees it, and who works on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..._network.checks import network_dtype_device

__all__ = ["Inputs", "Workers", "check_keep", "kept_names", "numbers"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Inputs:
    """Where the inputs of a network are, and how they are made of a column.

    Attributes:
        column: Name of the inputs.
        scale: What they are multiplied by, e.g. ``1 / 255`` for bytes.
        preprocess: What is done to a batch after that, on the device of the network and in at
            least float32.
        ids: Whether whole numbers are ids, which an embedding reads as they are.
    """

    column: str = "x"
    scale: float = 1.0
    preprocess: Callable[[Tensor], Tensor] | None = None
    ids: bool = False

    def of(self, batch: Mapping[str, Array], network: nn.Module, device: str) -> Tensor:
        """The inputs of a batch of columns, in the dtype of the network; ids as they are."""
        x = numbers(batch, self.column, "name the inputs with column=").to(device)
        dtype = network_dtype_device(network)[0] or torch.float32
        if not self.ids or x.is_floating_point():
            # Scaled in at least float32, also for networks in half precision.
            x = x.to(torch.promote_types(dtype, torch.float32)) * self.scale
        elif self.scale != 1:
            raise ValueError(
                f"scale = {self.scale:g}, and the column '{self.column}' holds ids, which cannot "
                "be scaled; leave scale= out"
            )
        if self.preprocess is not None:
            x = self._preprocessed(x)
        return x.to(dtype) if x.is_floating_point() else x

    def _preprocessed(self, x: Tensor) -> Tensor:
        assert self.preprocess is not None
        found = self.preprocess(x)
        if not isinstance(found, Tensor):
            raise TypeError(f"preprocess= returned a {type(found).__name__}, and not a tensor")
        if found.dim() == 0 or len(found) != len(x):
            raise ValueError(
                f"preprocess= made shape {tuple(found.shape)} of {len(x)} rows; it must give one "
                "row for each"
            )
        return found


def numbers(batch: Mapping[str, Array], column: str, hint: str) -> Tensor:
    """A column of a batch as a tensor.

    Raises:
        KeyError: There is no such column.
        TypeError: It holds no numbers.
        ValueError: The rows differ in shape.
    """
    if column not in batch:
        raise KeyError(f"the dataset has the columns {sorted(batch)}, and no '{column}'; {hint}")
    values = batch[column]
    if values.dtype == object:
        missing = next((number for number, row in enumerate(values) if row is None), None)
        if missing is not None:
            raise ValueError(f"row {missing} of '{column}' has no value; remove such rows")
        rows = [_dense(row, column) for row in values]
        shapes = {row.shape for row in rows}
        if len(shapes) > 1:
            raise ValueError(
                f"the rows of '{column}' have the shapes {sorted(shapes)[:3]}, and a network takes "
                "batches of one shape; whatever reads images brings them to one by size="
            )
        values = np.stack(rows)
    if values.dtype.kind not in "biuf":
        raise TypeError(
            f"the column '{column}' holds {values.ravel()[:3].tolist()}, and a network takes "
            "numbers; name a column of numbers, or of lists of them"
        )
    return torch.from_numpy(np.array(values))  # a copy: Ray's memory cannot be written to


def _dense(row: Any, column: str) -> Array:
    """A row as an array, also where it is a list of lists."""
    array = np.asarray(row)
    if array.dtype != object or array.ndim == 0:
        return array
    parts = [_dense(part, column) for part in array]
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"a row of '{column}' holds parts of the shapes {sorted(shapes)[:3]}, and a network "
            "takes arrays; fill the parts up to one shape"
        )
    return np.stack(parts)


def kept_names(names: Sequence[str], column: str, keep: Sequence[str] | None) -> list[str]:
    """The columns to keep of those that there are; all but the inputs if none are named.

    Raises:
        KeyError: A named one is not there.
    """
    if keep is None:
        return [name for name in names if name != column]
    missing = [name for name in keep if name not in names]
    if missing:
        raise KeyError(
            f"the data have the columns {sorted(names)}, and no '{missing[0]}'; name the columns "
            "that are kept with keep="
        )
    return list(keep)


def check_keep(keep: Sequence[str] | None) -> list[str] | None:
    """Refuse a word where names of columns are wanted."""
    if isinstance(keep, str):
        raise TypeError(f"keep={keep!r} is one word; give a list of names: keep=[{keep!r}]")
    return None if keep is None else list(keep)


def no_room(actors: int, cpus: float, there: float) -> bool:
    """Whether so many actors leave no whole CPU of those that are there.

    Ray's tasks reserve a whole one. A cluster without any gets some when they are asked for.
    """
    return 0 < there < actors * cpus + 1


@dataclass(frozen=True)
class Workers:
    """Who works on a data set.

    Attributes:
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.
    """

    actors: int | tuple[int, int] = 1
    gpus: float = 0.0
    cpus: float = 1.0

    def leave_room(self) -> None:
        """Warn the caller's caller if no CPU is left for the tasks that read a data set."""
        import ray

        low = self.actors[0] if isinstance(self.actors, tuple) else self.actors
        there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        if no_room(low, self.cpus, there):
            warnings.warn(
                f"{low} actors that reserve {self.cpus:g} CPUs each leave no whole one of the "
                f"cluster's {there:g} CPUs for reading: unless the data are in memory, the run "
                "waits for ever; pass fewer actors=, or a smaller cpus=",
                stacklevel=3,
            )

    def map(self, dataset: Any, worker: Any, rows: int, **options: Any) -> Any:
        """The data set with batches of so many rows mapped by a class, lazily.

        A lost worker is replaced, and its batch is run again, as often as it takes: that is Ray's
        default for pools of actors, and its releases from 2.64 on let nobody choose another number.
        A worker whose class raises an error as it is made ends the run.

        Args:
            dataset: A ``ray.data.Dataset``.
            worker: The class.
            rows: Rows in a batch.
            options: What the class is made with.
        """
        import ray

        low, high = self.actors if isinstance(self.actors, tuple) else (self.actors, self.actors)
        return dataset.map_batches(
            worker,
            fn_constructor_kwargs=options,
            batch_size=rows,
            batch_format="numpy",
            # `concurrency` became `compute` in later releases; both take a pool of actors.
            compute=ray.data.ActorPoolStrategy(min_size=low, max_size=high),
            num_gpus=self.gpus,
            num_cpus=self.cpus,
        )
