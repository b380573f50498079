"""Penultimate features: the input of the last linear layer, read in the pass of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._network.batches import Batch
from ..._network.running import watching
from .base import Detector

__all__ = ["penultimate", "watch_head"]


def penultimate(detector: Detector, x: Batch) -> tuple[Tensor, Tensor]:
    """Input of the last linear layer, ``(B, D)``, and the logits, in one pass."""
    return watch_head(detector, x)[1:]


def watch_head(detector: Detector, x: Batch) -> tuple[nn.Linear, Tensor, Tensor]:
    """The last linear layer that ran, the features that went into it, and the logits, in one pass.

    Raises:
        ValueError: The logits are not the output of the last linear layer.
    """
    last: tuple[nn.Linear, Tensor, Tensor] | None = None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal last
        if isinstance(module, nn.Linear):
            last = (module, args[0], output)

    network = detector.network
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    with watching(network, dict.fromkeys(linear, after)):
        logits = detector._logits(x)
    if last is None or not _same(last[2].double(), logits):
        raise ValueError(
            f"{type(detector).__name__} reads what goes into the last nn.Linear, and this "
            "network's outputs do not come straight out of one; use a network that ends in an "
            f"nn.Linear{detector.without_head}"
        )
    head, features, _ = last
    return head, features, logits


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
