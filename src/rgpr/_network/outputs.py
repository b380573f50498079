"""The tensor of outputs in whatever a network returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["outputs_of"]


def outputs_of(output: Any, x: Tensor) -> Tensor:
    """Outputs ``(B, C)`` from what a network returned; one number per input becomes ``(B, 1)``."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif not isinstance(output, Tensor) and hasattr(output, "logits"):
        output = output.logits
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the network returned {type(output).__name__}; expected a tensor of logits or "
            "outputs, or an object that holds one as .logits. Wrap the network in a module that "
            "returns the tensor"
        )
    outputs: Tensor = output
    if outputs.dim() == 1 and outputs.shape[0] == x.shape[0]:
        outputs = outputs[:, None]
    if outputs.dim() != 2 or outputs.shape[0] != x.shape[0]:
        raise ValueError(
            f"the network returned shape {tuple(outputs.shape)} for {x.shape[0]} inputs; "
            "expected (B, C), one vector of outputs per input"
        )
    return outputs
