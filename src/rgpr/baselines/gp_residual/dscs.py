"""GP-DSCS: a network, and DSCS kernels on its inputs and outputs."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel

from ...integrations.gpytorch import DSCSKernel
from .base import GPResidual
from .kernels import columns

__all__ = ["GPDSCS"]


class GPDSCS(GPResidual):
    """The paper's gold standard: the residual's own kernel, with a GP posterior."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        batch = torch.Size([outputs])
        on_inputs, on_outputs = columns(inputs, outputs)
        return DSCSKernel(batch_shape=batch, active_dims=tuple(on_inputs)) + DSCSKernel(
            batch_shape=batch, active_dims=tuple(on_outputs)
        )
