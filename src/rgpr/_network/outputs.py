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
        dense = ""
        if outputs.dim() > 2 and outputs.shape[0] == x.shape[0]:
            pooled = (
                "lambda f: f.mean(1)" if outputs.dim() == 3 else "lambda f: f.flatten(2).mean(2)"
            )
            dense = (
                ". Outputs for every pixel or token are not answered one by one. The score of the "
                "whole input is there: wrap the network in a module that returns their mean over "
                f"positions ({pooled}), use likelihood='regression', and fit and calibrate with "
                "inputs alone; then score, p_value and flag work"
            )
        raise ValueError(
            f"the network returned shape {tuple(outputs.shape)} for {x.shape[0]} inputs; "
            f"expected (B, C), one vector of outputs per input{dense}"
        )
    return outputs
