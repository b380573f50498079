"""The DSCS kernel for gpytorch."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Interval, Positive
from torch import Tensor

from ..kernels import dscs, dscs_gram

__all__ = ["DSCSKernel"]


class DSCSKernel(gpytorch.kernels.Kernel):
    r"""Double-sided cubic spline kernel, :math:`k(x, x'; \sigma^2)` of the paper.

    It is not stationary: center and scale the inputs so that the data lie around the origin. It
    has no lengthscale, since scaling the inputs by ``s`` is the same as scaling the variance by
    ``s**3``.

    Args:
        variance_prior: Prior on the variance.
        variance_constraint: Constraint on the variance; positive by default.
        offset: Distance from the origin at which the features start; zero is the paper's kernel.
        **kwargs: As for every gpytorch kernel (``batch_shape``, ``active_dims``).

    Attributes:
        variance: The scale, of shape ``batch_shape``; learned through ``raw_variance``.

    >>> kernel = DSCSKernel()
    >>> kernel(torch.tensor([[1.0], [2.0]])).to_dense().detach()
    tensor([[0.2310, 0.5776],
            [0.5776, 1.8484]])
    """

    is_stationary = False
    has_lengthscale = False

    def __init__(
        self,
        variance_prior: gpytorch.priors.Prior | None = None,
        variance_constraint: Interval | None = None,
        offset: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.offset = offset
        self.register_parameter("raw_variance", torch.nn.Parameter(torch.zeros(self.batch_shape)))
        if variance_prior is not None:
            self.register_prior(
                "variance_prior",
                variance_prior,
                lambda module: module.variance,
                lambda module, value: module._set_variance(value),
            )
        self.register_constraint("raw_variance", variance_constraint or Positive())

    @property
    def variance(self) -> Tensor:
        return self.raw_variance_constraint.transform(self.raw_variance)  # type: ignore[no-any-return]

    @variance.setter
    def variance(self, value: float | Tensor) -> None:
        self._set_variance(value)

    def _set_variance(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value).to(self.raw_variance)
        raw = self.raw_variance_constraint.inverse_transform(value)
        self.initialize(raw_variance=raw.expand_as(self.raw_variance))

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        variance = self.variance
        if last_dim_is_batch:
            # One kernel per dimension: (..., n, d) -> (..., d, n, 1).
            x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
            variance = variance.unsqueeze(-1)
        if not diag:
            return dscs_gram(x1, x2, variance=variance, offset=self.offset)
        return dscs(x1, x2, variance=variance.unsqueeze(-1), offset=self.offset)
