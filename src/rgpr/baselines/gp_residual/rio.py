"""RIO (Qiu et al., 2020): a network, and RBF kernels on its inputs and outputs."""

from __future__ import annotations

from gpytorch.kernels import Kernel

from .base import GPResidual
from .kernels import columns, rbf

__all__ = ["RIO"]


class RIO(GPResidual):
    """Residual estimation with an input-output kernel, of RBF kernels."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        on_inputs, on_outputs = columns(inputs, outputs)
        return rbf(on_inputs, outputs) + rbf(on_outputs, outputs)
