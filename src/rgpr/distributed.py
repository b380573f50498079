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

__all__ = ["active", "merge_laplace", "together"]

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
        mine = _moved(run(), torch.device("cpu"))
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
    return [_moved(theirs, device) for theirs, _ in everyone]


def merge_laplace(la: Any) -> Any:
    """One laplace-torch object from those that every rank fitted to its own shard.

    Call it on all ranks after ``la.fit(shard)``. The curvature of the data is a sum over examples
    (of Kronecker factors, one of each pair is a mean), so the result is that of one process over
    all the data up to rounding. Alone, nothing changes.

    Args:
        la: A fitted Laplace approximation with a full, diagonal or Kronecker-factored Hessian.

    Returns:
        The object itself; choose its prior precision after this, not before.

    Raises:
        TypeError: A structure that is no sum over examples.
    """
    if not active():
        return la
    kind = type(la).__name__
    kron = getattr(la, "H_facs", None)
    if kron is None and not kind.startswith(("Full", "Diag")):
        raise TypeError(f"the Hessian of a {kind} is no sum over shards; use full, diag or kron")
    factors = la.H if kron is None else kron.kfacs
    loss = torch.as_tensor(la.loss, dtype=torch.float64)
    shards = together(lambda: (factors, loss, la.n_data), la._device)
    total = sum(count for _, _, count in shards)
    la.loss, la.n_data = float(sum(loss for _, loss, _ in shards)), total
    if hasattr(la, "_posterior_scale"):
        la._posterior_scale = None  # of the shard alone
    if kron is None:
        la.H = sum(hessian for hessian, _, _ in shards)
        return la
    for block, factor in enumerate(kron.kfacs):
        parts = [(theirs[block], count / total) for theirs, _, count in shards]
        # The gradients' factor is a sum over examples, the inputs' their mean.
        merged = [sum(part[0] for part, _ in parts)]
        if len(factor) == 2:
            merged.append(sum(part[1] * share for part, share in parts))
        kron.kfacs[block] = merged
    la.H = kron.decompose(damping=la.damping)
    return la


def _moved(item: Any, device: torch.device | None) -> Any:
    if isinstance(item, Tensor):
        return item if device is None else item.to(device)
    if isinstance(item, dict):
        return {name: _moved(value, device) for name, value in item.items()}
    if isinstance(item, list):
        return [_moved(value, device) for value in item]
    if isinstance(item, tuple):
        return tuple(_moved(value, device) for value in item)
    return item
