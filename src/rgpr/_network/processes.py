"""Several processes, one result: under ``torch.distributed`` each rank passes its own shard.

``fit`` and ``tune`` reduce a shard to sufficient statistics, exchange those, and merge them in the
same order everywhere, so all ranks end with the same model, which is that of one process over all
the data up to rounding. Shards may be uneven, or empty. What fails on one rank fails on all of
them, instead of leaving the others to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

__all__ = ["active", "moved", "together"]

T = TypeVar("T")


def active() -> bool:
    """Whether there is more than one process."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def together(run: Callable[[], T], device: torch.device | None = None) -> list[T]:
    """What ``run()`` gives on every rank, in the order of ranks; alone, a list of one.

    Args:
        run: Gives tensors in lists, tuples and dicts.
        device: Where the tensors of all ranks shall be; they travel through main memory.

    Raises:
        RuntimeError: It failed on another rank; what failed on this one is raised as it is.
    """
    if not active():
        return [run()]
    mine: Any = None
    error: Exception | None = None
    try:
        mine = moved(run(), torch.device("cpu"))
    except Exception as failure:
        error = failure
    everyone: list[Any] = [None] * distributed.get_world_size()
    problem = None if error is None else f"{type(error).__name__}: {error}"
    distributed.all_gather_object(everyone, (mine, problem))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise RuntimeError(f"rank {rank} failed, so this one stops too: {problem}")
    return [moved(theirs, device) for theirs, _ in everyone]


def moved(item: Any, device: torch.device | None) -> Any:
    """The item with all tensors in its lists, tuples and dicts on a device."""
    if isinstance(item, Tensor):
        return item if device is None else item.to(device)
    if isinstance(item, dict):
        return {name: moved(value, device) for name, value in item.items()}
    if isinstance(item, list):
        return [moved(value, device) for value in item]
    if isinstance(item, tuple) and not isinstance(item, torch.Size):
        return tuple(moved(value, device) for value in item)
    return item
