"""laplace-torch over several processes; :mod:`rgpr.posteriors` wraps what it fitted."""

from __future__ import annotations

from typing import Any

import torch

from .._network.processes import active, together

__all__ = ["merge_laplace"]


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
