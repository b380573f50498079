r"""Sparse Gaussian processes with inducing points, one for each output, and their fit.

Each GP has inducing points :math:`Z`. With :math:`K_{ZZ} = L L^\top`, values :math:`u = L w` at the
points, :math:`w \sim N(m, R R^\top)`, and :math:`A = L^{-1} k(Z, z)`,

.. math:: g(z) \sim N\big(A^\top m,\; k(z, z) - \|A\|^2 + \|R^\top A\|^2\big),

fitted by maximising :math:`\sum_i E \log p(y_i \mid g(z_i)) - KL(q(w) \| N(0, I))`. An exact GP is
the case in which :math:`Z` are all rows, :math:`L L^\top = K_{ZZ} + \sigma^2 I` and :math:`R = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._progress import bar
from .gaussian import standard_normal

if TYPE_CHECKING:
    from gpytorch.kernels import Kernel

__all__ = [
    "Batch",
    "GaussianProcesses",
    "Units",
    "Variational",
    "class_labels",
    "fit_variational",
    "regression_targets",
]

# Points (B, D), targets, and the logits (B, C) or zero that are added to the GPs' values.
Batch = tuple[Tensor, Tensor, Tensor | float]

# Added to the diagonal of K_ZZ, in units of its mean, so that the matrix has a Cholesky factor.
_JITTER = 1e-6

# Samples of the GPs' values at each row, from which the expectation of the softmax is estimated.
_SAMPLES = 8


@dataclass(frozen=True)
class Units:
    """Units of the outputs: the values ``g`` of GPs give outputs ``shift + scale * g``.

    Attributes:
        scale: Size of each output, ``(C,)``.
        shift: Value of each output where its GP is zero, ``(C,)``.
        noise: Variance of the observations around each output, ``(C,)``. It is zero for
            classification, and before a fit has found it.
    """

    scale: Tensor
    shift: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Variational:
    """How :func:`fit_variational` learns.

    Attributes:
        rows: Number of rows in an epoch.
        likelihood: ``"classification"`` or ``"regression"``.
        epochs: Passes over the batches.
        lr: Adam's learning rate.
        learn_points: Whether the inducing points move.
        description: Name on the progress bar.
        progress: Show a progress bar where there is a terminal.
        others: Adam's parameter groups for parameters that are learned besides the GPs' own.
    """

    rows: int
    likelihood: str
    epochs: int
    lr: float
    learn_points: bool
    description: str
    progress: bool
    others: Sequence[dict[str, Any]] = ()


class GaussianProcesses(nn.Module):
    """``C`` independent GPs, conditioned on data or on inducing values; see the head of the file.

    The GPs stay in float64 when the model around them is cast to another dtype, because their
    matrices are too badly conditioned for fewer digits.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``.
        points: ``Z``: ``(M, D)`` if all GPs share the points, or ``(C, M, D)``.
        cholesky: ``L``, ``(C, M, M)``.
        weights: ``m``, ``(C, M)``.
        root: ``R``, ``(C, M, M)``; ``None`` means zero, which is an exact GP.
        units: Units of the outputs. Predictions are of the function, so they leave out its noise.
    """

    points: Tensor
    cholesky: Tensor
    weights: Tensor
    root: Tensor | None
    scale: Tensor
    shift: Tensor
    noise: Tensor

    def __init__(
        self,
        kernel: Kernel,
        points: Tensor,
        cholesky: Tensor,
        weights: Tensor,
        root: Tensor | None,
        units: Units,
    ) -> None:
        super().__init__()
        self.kernel = kernel.requires_grad_(False)
        for name, tensor in (
            ("points", points),
            ("cholesky", cholesky),
            ("weights", weights),
            ("root", root),
            ("scale", units.scale),
            ("shift", units.shift),
            ("noise", units.noise),
        ):
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the functions at points ``(B, D)``, each ``(B, C)``."""
        mean, variance = _conditional(
            self.kernel, self.points, self.cholesky, self.weights, self.root, z
        )
        return self.shift + self.scale * mean, self.scale.square() * variance

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        return super()._apply(lambda t: t.to(fn(t).device), recurse)  # type: ignore[no-untyped-call]


def _conditional(
    kernel: Kernel,
    points: Tensor,
    cholesky: Tensor,
    weights: Tensor,
    root: Tensor | None,
    z: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the GPs at ``z``, each ``(B, C)``, by the formula at the file's head."""
    A = torch.linalg.solve_triangular(cholesky, kernel(points, z).to_dense(), upper=False)
    mean = (A.mT @ weights[..., None]).squeeze(-1)
    variance = kernel(z, diag=True) - A.square().sum(-2)
    if root is not None:
        variance = variance + (root.mT @ A).square().sum(-2)
    # Rounding can make a variance near zero negative.
    return mean.mT, variance.clamp_min(0).mT


@torch.inference_mode(False)
@torch.enable_grad()
def fit_variational(
    kernel: Kernel,
    points: Tensor,
    units: Units,
    batches: Callable[[torch.Generator], Iterator[Batch]],
    generator: torch.Generator,
    how: Variational,
) -> GaussianProcesses:
    """Maximise the evidence lower bound of sparse GPs by Adam.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``; its parameters are learned.
        points: Where the inducing points start, ``(M, D)`` or ``(C, M, D)``.
        units: Units of the outputs. They do not enter the fit, whose regression targets are
            already in these units, but they are part of the result.
        batches: Makes the batches of one epoch.
        generator: Source of the order of rows and of the samples.
        how: How the GPs are learned.

    Returns:
        The GPs; for regression with the variance of the noise that was found.
    """
    bound = _LowerBound(kernel, points, len(units.scale), how)
    optimizer = torch.optim.Adam([{"params": bound.parameters()}, *how.others], lr=how.lr)
    for _ in bar(range(how.epochs), how.description, how.progress):
        for batch in batches(generator):
            loss = bound.loss(batch, generator)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for parameter in (p for group in how.others for p in group["params"]):
        parameter.grad = None
    with torch.no_grad():
        cholesky, root, noise = bound.state()
    if how.likelihood == "regression":
        units = replace(units, noise=units.scale.square() * noise)
    return GaussianProcesses(bound.kernel, bound.points, cholesky, bound.weights, root, units)


class _LowerBound:
    """The evidence lower bound of sparse GPs, as a function of their parameters.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``.
        points: Where the inducing points start, ``(M, D)`` or ``(C, M, D)``.
        outputs: ``C``.
        how: The likelihood, the number of rows, and whether the inducing points move.
    """

    def __init__(self, kernel: Kernel, points: Tensor, outputs: int, how: Variational) -> None:
        self.kernel, self.how = kernel.to(points), how
        self.points = points.detach().clone().requires_grad_(how.learn_points)
        size = points.shape[-2]
        self.identity = torch.eye(size, dtype=points.dtype, device=points.device)
        self.weights = points.new_zeros(outputs, size).requires_grad_()
        # softplus(log(e - 1)) = 1, so q(w) starts at the prior N(0, I).
        one = math.log(math.e - 1)
        self.raw_root = (one * self.identity).repeat(outputs, 1, 1).requires_grad_()
        self.raw_noise = points.new_full((outputs,), -2.0).requires_grad_()

    def parameters(self) -> list[Tensor]:
        """The tensors that are learned."""
        own = [self.weights, self.raw_root, self.raw_noise, *self.kernel.parameters()]
        return [*own, self.points] if self.how.learn_points else own

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """The factors ``L`` and ``R``, ``(C, M, M)`` each, and the noise's variance ``(C,)``."""
        K = self.kernel(self.points).to_dense()
        size = K.detach().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        cholesky = torch.linalg.cholesky(K + (_JITTER * size + 1e-12) * self.identity)
        diagonal = F.softplus(self.raw_root.diagonal(dim1=-2, dim2=-1))
        root = self.raw_root.tril(-1) + torch.diag_embed(diagonal)
        return cholesky, root, F.softplus(self.raw_noise)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The negative lower bound per row, estimated from one batch."""
        z, y, offset = batch
        cholesky, root, noise = self.state()
        mean, variance = _conditional(self.kernel, self.points, cholesky, self.weights, root, z)
        if self.how.likelihood == "classification":
            fit = _softmax_fit(mean + offset, variance, y, generator)
        else:
            fit = _gaussian_fit(mean, variance, y, noise)
        logs = root.diagonal(dim1=-2, dim2=-1).log().sum()
        squares = root.square().sum() + self.weights.square().sum()
        kl = 0.5 * (squares - self.weights.numel()) - logs
        return kl / self.how.rows - fit


def _softmax_fit(mean: Tensor, variance: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Expected log-likelihood per row of a softmax, estimated by samples of the marginals."""
    noise = standard_normal((_SAMPLES, *mean.shape), mean, generator)
    # The clamp keeps the derivative finite, because the square root has none at zero.
    samples = mean + variance.clamp_min(1e-12).sqrt() * noise
    index = y.expand(_SAMPLES, -1)[..., None]
    return samples.log_softmax(-1).gather(-1, index).mean()


def _gaussian_fit(mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """Expected log-likelihood per row of targets ``(B, C)`` with Gaussian noise, in closed form."""
    squares = ((y - mean).square() + variance) / noise
    return -0.5 * (squares + (2 * math.pi * noise).log()).sum(-1).mean()


def class_labels(y: Tensor, classes: int | None) -> tuple[Tensor, int]:
    """Class indices ``(N,)`` as int64, and the number of classes.

    Args:
        y: Class indices of any integer dtype.
        classes: Number of classes; by default one more than the largest label.

    Raises:
        TypeError: The labels are not whole numbers.
        ValueError: The labels are not one per input, out of range, or of a single class.
    """
    if y.is_floating_point() or y.is_complex():
        raise TypeError(f"labels have dtype {y.dtype}; classification takes class indices (long)")
    if y.dim() != 1:
        raise ValueError(f"labels have shape {tuple(y.shape)}; expected one class index per input")
    largest = int(y.max())
    number = largest + 1 if classes is None else classes
    if number < 2 or int(y.min()) < 0 or largest >= number:
        raise ValueError(
            f"labels run from {int(y.min())} to {largest} with {number} classes; the softmax needs "
            "two or more classes and labels 0 .. C - 1"
        )
    return y.long(), number


def regression_targets(y: Tensor, rows: int) -> Tensor:
    """Regression targets ``(N, C)`` in float64.

    Args:
        y: Targets ``(N,)`` or ``(N, C)``.
        rows: ``N``, the number of inputs.

    Raises:
        ValueError: The targets are not one number or vector per input, or not finite.
    """
    y = y[:, None] if y.dim() == 1 else y
    if y.dim() != 2 or len(y) != rows:
        raise ValueError(f"targets have shape {tuple(y.shape)} for {rows} inputs; expected (N, C)")
    if not bool(y.isfinite().all()):
        raise ValueError("targets hold values that are not finite (NaN or inf); remove these rows")
    return y.double()
