"""The kernels on standardised inputs and outputs side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, ScaleKernel

from ...posteriors.svgp import RBFKernel

__all__ = ["columns", "rbf"]


def columns(inputs: int, outputs: int) -> tuple[range, range]:
    """The columns of standardised inputs, and those of outputs."""
    return range(inputs), range(inputs, inputs + outputs)


def rbf(on: Sequence[int], outputs: int) -> Kernel:
    """An RBF kernel on some columns, with a scale and a lengthscale for each output."""
    batch = torch.Size([outputs])
    # Standardised points lie about sqrt(2 D) apart. Without a limit a smooth residual drives
    # lengthscale and scale up together, until the matrix has no digits left.
    typical = math.sqrt(len(on))
    kernel = RBFKernel(
        batch_shape=batch,
        active_dims=tuple(on),
        lengthscale_constraint=Interval(1e-3 * typical, 10 * typical),
    )
    kernel.lengthscale = typical
    return ScaleKernel(kernel, batch_shape=batch)
