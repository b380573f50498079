"""Sparse Gaussian processes with inducing points, one for each output, and how they are fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gpytorch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from .gaussian import standard_normal

__all__ = ["Batch", "GaussianProcesses", "class_labels", "fit_variational", "regression_targets"]

# Features (B, D), targets, and what is added to the GPs' logits: (B, C) or zero.
Batch = tuple[Tensor, Tensor, Tensor | float]


_JITTER = 1e-6


_SAMPLES = 8


class GaussianProcesses(nn.Module):
    """``C`` independent GPs, conditioned on data or on inducing values; see the head of the file.

    They stay in float64 whatever the model around them is cast to: their matrices have no digits
    to spare.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``.
        points: ``Z``: ``(M, D)``, or ``(C, M, D)`` for points of each GP's own.
        cholesky: ``L``, ``(C, M, M)``.
        weights: ``m``, ``(C, M)``.
        root: ``R``, ``(C, M, M)``; ``None`` for zero, an exact GP.
        scale: Of the outputs, ``(C,)``.
        shift: Of the outputs, ``(C,)``.
        noise: Variance of observations around the function, ``(C,)``; zero for classification.
            Predictions are of the function, without it.
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
        kernel: gpytorch.kernels.Kernel,
        points: Tensor,
        cholesky: Tensor,
        weights: Tensor,
        root: Tensor | None,
        *,
        scale: Tensor,
        shift: Tensor,
        noise: Tensor,
    ) -> None:
        super().__init__()
        self.kernel = kernel.requires_grad_(False)
        for name, tensor in (
            ("points", points),
            ("cholesky", cholesky),
            ("weights", weights),
            ("root", root),
            ("scale", scale),
            ("shift", shift),
            ("noise", noise),
        ):
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the functions at ``z``: ``(B, D)`` to two of ``(B, C)``."""
        mean, variance = _conditional(
            self.kernel, self.points, self.cholesky, self.weights, self.root, z
        )
        return self.shift + self.scale * mean, self.scale.square() * variance

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        return super()._apply(lambda t: t.to(fn(t).device), recurse)  # type: ignore[no-untyped-call]


def _conditional(
    kernel: gpytorch.kernels.Kernel,
    points: Tensor,
    cholesky: Tensor,
    weights: Tensor,
    root: Tensor | None,
    z: Tensor,
) -> tuple[Tensor, Tensor]:
    A = torch.linalg.solve_triangular(cholesky, kernel(points, z).to_dense(), upper=False)
    mean = (A.mT @ weights[..., None]).squeeze(-1)
    variance = kernel(z, diag=True) - A.square().sum(-2)
    if root is not None:
        variance = variance + (root.mT @ A).square().sum(-2)
    # Rounding takes a variance near zero below it.
    return mean.mT, variance.clamp_min(0).mT


@torch.inference_mode(False)
@torch.enable_grad()
def fit_variational(
    kernel: gpytorch.kernels.Kernel,
    points: Tensor,
    batches: Callable[[torch.Generator], Iterator[Batch]],
    *,
    rows: int,
    likelihood: str,
    shift: Tensor,
    scale: Tensor,
    learn_points: bool,
    epochs: int,
    lr: float,
    generator: torch.Generator,
    others: Iterable[dict[str, Any]] = (),
    description: str,
    progress: bool,
) -> GaussianProcesses:
    """Maximise the evidence lower bound of sparse GPs by Adam.

    Args:
        kernel: With batch shape ``(C,)``; its parameters are learned.
        points: Where the inducing points start.
        batches: Makes one epoch's batches; regression targets in units of ``scale``.
        rows: Number of rows in an epoch.
        likelihood: ``"classification"`` or ``"regression"``.
        shift: Of the outputs, ``(C,)``; it only goes into the answer.
        scale: Of the outputs, ``(C,)``; it only goes into the answer.
        learn_points: Whether the inducing points move.
        epochs: Passes over the batches.
        lr: Adam's learning rate.
        generator: Source of order and noise.
        others: Further parameter groups to learn.
        description: Name on the progress bar.
        progress: Show a progress bar where there is a terminal.
    """
    kernel = kernel.to(points)
    C, M = len(scale), points.shape[-2]
    eye = torch.eye(M, dtype=points.dtype, device=points.device)
    Z = points.detach().clone().requires_grad_(learn_points)
    weights = eye.new_zeros(C, M).requires_grad_()
    # A diagonal of softplus(raw) = 1: the prior.
    raw_root = (math.log(math.e - 1) * eye).repeat(C, 1, 1).requires_grad_()
    raw_noise = eye.new_full((C,), -2.0).requires_grad_()
    own = [weights, raw_root, raw_noise, *kernel.parameters(), *([Z] if learn_points else [])]
    optimizer = torch.optim.Adam([{"params": own}, *others], lr=lr)

    def state() -> tuple[Tensor, Tensor, Tensor]:
        K = kernel(Z).to_dense()
        size = K.detach().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        cholesky = torch.linalg.cholesky(K + (_JITTER * size + 1e-12) * eye)
        diagonal = F.softplus(raw_root.diagonal(dim1=-2, dim2=-1))
        return cholesky, raw_root.tril(-1) + torch.diag_embed(diagonal), F.softplus(raw_noise)

    disable = None if progress else True
    for _ in tqdm(range(epochs), desc=description, leave=False, disable=disable):
        for z, y, offset in batches(generator):
            cholesky, root, noise = state()
            mean, variance = _conditional(kernel, Z, cholesky, weights, root, z)
            if likelihood == "classification":
                fit = _softmax_fit(mean + offset, variance, y, generator)
            else:
                squares = ((y - mean).square() + variance) / noise
                fit = -0.5 * (squares + (2 * math.pi * noise).log()).sum(-1).mean()
            logs = root.diagonal(dim1=-2, dim2=-1).log().sum()
            kl = 0.5 * (root.square().sum() + weights.square().sum() - C * M) - logs
            optimizer.zero_grad()
            (kl / rows - fit).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        cholesky, root, noise = state()
        noise = scale.square() * (noise if likelihood == "regression" else 0.0)
    for parameter in (p for group in others for p in group["params"]):
        parameter.grad = None
    return GaussianProcesses(
        kernel, Z, cholesky, weights, root, scale=scale, shift=shift, noise=noise
    )


def _softmax_fit(mean: Tensor, variance: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Expected log-likelihood per row, by samples of the marginals."""
    noise = standard_normal((_SAMPLES, *mean.shape), mean, generator)
    # The root of zero has no derivative.
    samples = mean + variance.clamp_min(1e-12).sqrt() * noise
    index = y.expand(_SAMPLES, -1)[..., None]
    return samples.log_softmax(-1).gather(-1, index).mean()


def class_labels(y: Tensor, classes: int | None) -> tuple[Tensor, int]:
    """Class indices ``(N,)`` and the number of classes.

    Raises:
        TypeError: They are not whole numbers.
        ValueError: They are not one per input, out of range, or of a single class.
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
    """Targets ``(N, C)`` in float64.

    Raises:
        ValueError: They are not one number or vector per input, or not finite.
    """
    y = y[:, None] if y.dim() == 1 else y
    if y.dim() != 2 or len(y) != rows:
        raise ValueError(f"targets have shape {tuple(y.shape)} for {rows} inputs; expected (N, C)")
    if not bool(y.isfinite().all()):
        raise ValueError("targets hold values that are not finite (NaN or inf); remove these rows")
    return y.double()
