r"""The exact posterior of RGPR as a Gaussian process, and Proposition 1's approximation of it.

For a network linearised around its weights' mean, with real outputs, RGPR is the process

.. math:: \tilde f \sim GP\big(f(\cdot; \mu),\;
          g(x)^\top \Sigma\, g(x') + k(x, x')\big), \qquad g(x) = \nabla_\theta f(x; \mu).

Given data the exact posterior conditions on both kernels. Proposition 1 leaves ``k`` out of
everything but :math:`k(x_*, x_*)`, since it is near zero at the data: the posterior of the network
plus the *prior* of the residual, which is why RGPR needs no inference. The error is of third
order in the size of the standardised data (the paper's sixth order multiplies two errors that
add; see the documentation). For small data: both form the kernel matrix of the training set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from .._network.guards import evaluating
from ..kernels import dscs_gram

__all__ = ["ResidualProcess"]

GramFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ResidualProcess:
    """RGPR with a scalar regression network, as a Gaussian process.

    Args:
        network: Maps ``(B, ...)`` to ``(B,)`` or ``(B, 1)``; its parameters are the mean.
        covariance: ``(P, P)`` over the parameters in the order of ``network.parameters()``.
        gram: The residual's kernel matrix of two sets of inputs; DSCS of the inputs by default.
        noise: Variance of the observations' noise. Without any, the network's kernel matrix
            must be invertible, which takes no more data than parameters.
    """

    network: nn.Module
    covariance: Tensor
    gram: GramFunction = dscs_gram
    noise: float = 0.0

    def exact(self, x: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance at ``x`` given the data ``(X, y)``, each ``(B,)``."""
        return self._condition(x, X, y, in_covariances=True)

    def approximate(self, x: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same by Proposition 1: the residual only adds its prior variance."""
        return self._condition(x, X, y, in_covariances=False)

    def _condition(
        self, x: Tensor, X: Tensor, y: Tensor, in_covariances: bool
    ) -> tuple[Tensor, Tensor]:
        f, g = self._linearise(x)
        F, G = self._linearise(X)
        cross = g @ self.covariance @ G.T
        inner = G @ self.covariance @ G.T
        if in_covariances:
            cross, inner = cross + self.gram(x, X), inner + self.gram(X, X)
        inner = inner + self.noise * torch.eye(len(X), dtype=inner.dtype, device=inner.device)
        factor, info = torch.linalg.cholesky_ex(inner)
        if int(info) > 0:
            raise ValueError(
                f"the kernel matrix of {len(X)} inputs is not positive definite: the network has "
                f"{G.shape[1]} parameters, and noise = {self.noise}. Give a larger noise or "
                "fewer, distinct inputs"
            )
        residuals = (y.reshape(-1) - F)[:, None]
        mean = f + (cross @ torch.cholesky_solve(residuals, factor)).squeeze(-1)
        whitened = torch.linalg.solve_triangular(factor, cross.T, upper=False)
        prior = ((g @ self.covariance) * g).sum(-1) + self._diagonal(x)
        return mean, prior - whitened.square().sum(0)

    def _diagonal(self, x: Tensor) -> Tensor:
        return torch.stack([self.gram(row, row).squeeze() for row in torch.split(x, 1)])

    def _linearise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs ``(B,)`` and their gradients in the parameters ``(B, P)``."""
        parameters = {name: p.detach() for name, p in self.network.named_parameters()}

        def output(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            result: Tensor = functional_call(self.network, parameters, (row[None],))
            return result.reshape(())

        with evaluating(self.network) as modes, modes:
            values: Tensor = vmap(lambda row: output(parameters, row))(x)
            gradients = vmap(jacrev(output), (None, 0))(parameters, x)
        return values, torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)
