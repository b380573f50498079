r"""The marginal likelihood of RGPR as a Gaussian process.

The prior over the outputs is :math:`GP(f(\cdot; \mu),\; g^\top \Sigma\, g + \sum_l \sigma_l^2 k_l)`
with the network's Jacobian ``g``, the base's covariance and one DSCS kernel for each
representation (the paper's Proposition 1 starts from it). Outputs are independent of each other
a priori, with the base's own variance for each.

**Regression.** Exact: :math:`\log N(y \mid f(X), K + \text{noise}\, I)`.

**Classification.** Laplace's approximation around the mode of the outputs given the labels
(Rasmussen and Williams, *Gaussian Processes for Machine Learning*, section 3.5):
:math:`\log p(y \mid \hat f) - \tfrac12 (\hat f - f(X))^\top K^{-1} (\hat f - f(X))
- \tfrac12 \log |I + K W|`, with :math:`W` the curvature of the softmax. As
:math:`W = D - \Pi \Pi^\top`, the determinant is
:math:`\prod_c |I + D_c^{1/2} K_c D_c^{1/2}| \cdot |\sum_c E_c|`; the second factor is missing in
the book's algorithm 3.3. The mode depends on the scales: one more Newton step, differentiated,
carries that dependence exactly, since the step's own derivative vanishes at its fixed point.

**Several labels** are independent of each other, so their evidence is the sum of that of each as a
classification with one output.

Both form the kernel matrices of all inputs, so they are for up to a few thousand examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..._network.batches import Batch, rows_of
from ..._network.checks import check_batch, network_dtype_device
from ..._network.guards import evaluating
from ..._network.kept import joined
from ..._network.loaders import labelled, on_device
from ..._network.running import capture
from ..._progress import bar
from ...answers.examples import Parameters
from ...extension import Extension
from ...kernels import dscs_gram
from ...likelihoods import LabelLikelihood
from ...likelihoods.regression import log_density
from ...posteriors.gaussian import Gaussian
from ..options import Options
from .base import Data, Objective

__all__ = [
    "KernelMatrices",
    "MarginalLikelihood",
    "collect_matrices",
    "laplace_evidence",
    "regression_evidence",
]

# Entries of the largest matrices that are formed: some 15 of them live at once.
_ENTRIES = 40_000_000
_NEWTON = 100


class KernelMatrices:
    """A data set as the marginal likelihood sees it.

    Attributes:
        residual: ``(L, N, N)``, the unit-scale kernel of each representation.
        base: ``(C, N, N)``, the base's covariance of each output between inputs; ``(1, N, N)`` if
            all are equal.
        mean: ``(N, C)``, the network's outputs.
        target: Class indices ``(N,)``, labels or values ``(N, C)``.
    """

    def __init__(self, residual: Tensor, base: Tensor, mean: Tensor, target: Tensor) -> None:
        if mean.shape[1] == 1 and target.dim() == 1:
            # Two classes with the outputs 0 and f: the first is certain.
            mean = torch.cat([torch.zeros_like(mean), mean], 1)
            base = torch.cat([torch.zeros_like(base), base.expand(1, -1, -1)])
            self.active = torch.tensor([0.0, 1.0], dtype=torch.float64, device=mean.device)
        else:
            self.active = torch.ones(mean.shape[1], dtype=torch.float64, device=mean.device)
        self.residual, self.base, self.mean, self.target = residual, base, mean, target
        self.mode: Tensor | None = None  # where the last evaluation ended: the next one's start

    def __len__(self) -> int:
        return len(self.mean)

    def of_each_output(self) -> list[KernelMatrices]:
        """The same data as the process of each output alone sees them."""
        base = self.base.expand(self.mean.shape[1], -1, -1)
        return [
            KernelMatrices(self.residual, base[i : i + 1], self.mean[:, i : i + 1], target)
            for i, target in enumerate(self.target.unbind(1))
        ]

    def covariance(self, sigma2: Tensor) -> Tensor:
        """``(C, N, N)``: base and residual."""
        added: Tensor = torch.tensordot(sigma2, self.residual, 1)
        return self.base + self.active[:, None, None] * added

    def evidence(self, parameters: Parameters) -> Tensor:
        """The log marginal likelihood, divided by the number of examples."""
        K = self.covariance(parameters.sigma2)
        if self.target.is_floating_point():
            total = regression_evidence(K, self.mean, self.target, parameters.noise)
        else:
            total, self.mode = laplace_evidence(K, self.mean, self.target, start=self.mode)
        return total / len(self)


def regression_evidence(K: Tensor, mean: Tensor, target: Tensor, noise: Tensor) -> Tensor:
    """``log N(target | mean, K + noise I)``, summed over the outputs.

    Args:
        K: ``(C, N, N)``.
        mean: ``(N, C)``.
        target: ``(N, C)``.
        noise: A number.
    """
    eye = torch.eye(len(mean), dtype=K.dtype, device=K.device)
    root = _cholesky(K + noise * eye)
    error = torch.linalg.solve_triangular(root, (target - mean).T[:, :, None], upper=False)
    # A product of independent standard normals in the whitened coordinates.
    pivots = root.diagonal(dim1=1, dim2=2)
    return log_density(error[..., 0].square(), torch.ones_like(pivots)).sum() - pivots.log().sum()


def laplace_evidence(
    K: Tensor, mean: Tensor, target: Tensor, *, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Laplace's approximation of ``log p(target)``, and the mode as ``K^-1 (f - mean)``.

    Args:
        K: ``(C, N, N)``, positive semi-definite.
        mean: ``(N, C)``.
        target: ``(N,)``, class indices.
        start: ``(C, N)``, a mode to start from.
    """
    y = torch.nn.functional.one_hot(target, mean.shape[1]).T.to(mean)
    mu = mean.T

    def density(a: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """``log p(y | f) - 1/2 (f - mu)^T K^-1 (f - mu)``, and ``f - mu = K a``."""
        g = (K @ a[..., None])[..., 0]
        f = mu + g
        return (y * f).sum() - torch.logsumexp(f, 0).sum() - 0.5 * (a * g).sum(), g

    def newton(g: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """A Newton step from ``f = mu + g``: the new ``a``, and half the log-determinant."""
        p = torch.softmax(mu + g, 0)
        s = p.sqrt()
        eye = torch.eye(len(mean), dtype=K.dtype, device=K.device)
        root = _cholesky(eye + s[:, :, None] * K * s[:, None, :])
        whitened = torch.linalg.solve_triangular(root, torch.diag_embed(s), upper=False)
        E = whitened.mT @ whitened
        total = _cholesky(E.sum(0))
        b = p * g - p * (p * g).sum(0) + y - p
        c = (E @ (K @ b[..., None]))[..., 0]
        a = b - c + (E @ torch.cholesky_solve(c.sum(0)[:, None], total))[..., 0]
        logs = root.diagonal(dim1=1, dim2=2).log().sum() + total.diagonal().log().sum()
        return a, logs

    with torch.no_grad():
        fixed = K.detach()
        a = torch.zeros_like(mu) if start is None else start
        value, g = density(a, fixed)
        if start is not None:
            from_mean, at_mean = density(torch.zeros_like(mu), fixed)
            if from_mean > value:
                a, value, g = torch.zeros_like(mu), from_mean, at_mean
        for _ in range(_NEWTON):
            direction = newton(g, fixed)[0] - a
            step = 1.0
            while True:
                candidate = a + step * direction
                risen, moved = density(candidate, fixed)
                if risen >= value - 1e-12 * abs(value) or step < 1e-6:
                    break
                step /= 2
            change = float(moved.sub(g).abs().max())
            a, value, g = candidate, risen, moved
            if change < 1e-8 * (1 + float(g.abs().max())):
                break
    moving, _ = newton(g, K)
    value, g = density(moving, K)
    return value - newton(g, K)[1], a


def _cholesky(matrix: Tensor) -> Tensor:
    """The lower factor; a sliver on the diagonal where rounding made it indefinite."""
    root: Tensor
    root, info = torch.linalg.cholesky_ex(matrix)
    sliver = 1e-12
    while bool((info > 0).any()):
        if sliver > 1e-4:
            raise ValueError(
                "a kernel matrix is not positive definite: are there examples twice, or values "
                "that are not finite? For regression, give a larger noise="
            )
        scale = matrix.detach().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        root, info = torch.linalg.cholesky_ex(matrix + sliver * scale * eye)
        sliver *= 10
    return root


class MarginalLikelihood(Objective):
    """The marginal likelihood of all examples together."""

    name = "marginal-likelihood"
    takes_temperature = False
    of_shards = False
    starts = 1

    def __init__(self, extension: Extension, loader: Iterable[Any], options: Options) -> None:
        self.matrices = collect_matrices(extension, loader, options.progress)
        matrices, sizes = self.matrices, (len(self.matrices), 0)
        at_data = matrices.residual.diagonal(dim1=1, dim2=2).T
        self.data = Data(at_data, matrices.mean, matrices.target, sizes, sizes)
        likelihood = extension.likelihood
        apart = isinstance(likelihood, LabelLikelihood) and likelihood.independent
        self._processes = matrices.of_each_output() if apart else [matrices]

    def parts(self, parameters: Parameters, weight: float) -> list[Tensor]:
        return [process.evidence(parameters) for process in self._processes]


@torch.no_grad()
def collect_matrices(extension: Extension, loader: Iterable[Any], progress: bool) -> KernelMatrices:
    """Run the network over all examples and form the kernel matrices.

    Raises:
        ValueError: There are too many examples for that.
        TypeError: The base has no covariance between inputs.
    """
    posterior, residual = extension.posterior, extension.residual
    device = network_dtype_device(posterior.network)[1]
    coordinates = [residual.at(index) for index in range(len(extension.layers))]
    representations: list[list[Tensor]] = [[] for _ in coordinates]
    xs: list[Batch] = []
    targets: list[Tensor] = []
    means: list[Tensor] = []
    with evaluating(posterior) as modes, modes:
        for number, (batch, target) in enumerate(
            labelled(
                loader,
                posterior.network,
                progress=progress,
                description="rgpr marginal likelihood",
            )
        ):
            x = on_device(batch, device)
            measured = extension.source is None
            check_batch(number, x, posterior.network, extension.input_shape, measured=measured)
            if rows_of(x) == 0:
                continue
            pass_ = capture(posterior.network, extension.representations, coordinates, x)
            with pass_, pass_:
                gaussian: Gaussian = posterior(x)
            for parts, h in zip(representations, pass_.found, strict=True):
                parts.append(h)
            means.append(gaussian.mean.double())
            checked = extension.likelihood.target(target, gaussian.mean.shape, number)
            targets.append(checked.to(gaussian.mean.device))
            xs.append(x)
            _check_size(sum(map(rows_of, xs)), gaussian.mean.shape[1])
        base = posterior.covariances(joined(xs)).double()
    grams = []
    for index, parts in enumerate(bar(representations, "rgpr kernel matrices", progress)):
        offset = residual.at(index).offset
        grams.append(
            dscs_gram(torch.cat(parts).double(), offset=0.0 if offset is None else offset.double())
        )
    return KernelMatrices(torch.stack(grams), base, torch.cat(means), torch.cat(targets))


def _check_size(count: int, outputs: int) -> None:
    limit = int((_ENTRIES / outputs) ** 0.5)
    if count > limit:
        raise ValueError(
            f"the marginal likelihood forms kernel matrices of all examples: {outputs} outputs "
            f"allow {limit}, and the loader has more. Give a part of them, e.g. a DataLoader of "
            f"torch.utils.data.Subset(data, range({min(limit, 1000)})), or use "
            "objective='likelihood', whose cost does not grow so"
        )
