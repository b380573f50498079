r"""Gaussian processes by gpytorch for regression, stochastic variational or exact.

With inducing points :math:`Z`, values :math:`u \sim N(m, S)` at these points and
:math:`A = K_{ZZ}^{-1} k_Z(x)`,

.. math:: f(x) \sim N\big(A^\top m,\; k(x, x) - A^\top (K_{ZZ} - S) A\big).

The GP has no hidden layers, so the residual reads the input alone. With a stationary kernel the
variance levels off at that of the prior; the residual makes it grow without bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.utils.memoize import clear_cache_hook
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor, nn

from .._backend.precision import full_precision
from .._network.batches import Batch
from .._network.layers import LayerChoice
from .._network.representation import INPUT, Representation
from .._network.trace import Trace
from .._progress import bar
from .base import THROUGH_ANOTHER_LIBRARY, Posterior
from .gaussian import DiagonalGaussian, Gaussian

__all__ = ["SVGP", "RBFKernel", "epochs_for"]


class SVGP(Posterior):
    """A trained gpytorch model for regression. Its predictions leave out the observation noise.

    The posterior predicts through the gpytorch model, so it cannot be saved; save the model's own
    state instead.

    Args:
        model: A model in evaluation mode whose call returns a ``MultivariateNormal``. For several
            outputs the distribution has a batch dimension or is a
            ``MultitaskMultivariateNormal``.
        noise: Variance of the observations around the function, ``(C,)``, if known. The posterior
            keeps the noise for the caller; it does not enter predictions.

    Raises:
        ValueError: The model is in training mode.
    """

    likelihood = "regression"
    noise: Tensor | None

    def __init__(self, model: nn.Module, *, noise: Tensor | None = None) -> None:
        super().__init__(model)
        if self.network.training:
            raise ValueError(
                f"this {type(model).__name__} is in training mode, where gpytorch gives the prior; "
                "call model.eval() before wrapping it"
            )
        self.register_buffer("noise", noise)

    @classmethod
    @torch.inference_mode(False)
    @torch.enable_grad()
    def fit(
        cls,
        x: Tensor,
        y: Tensor,
        *,
        inducing: int = 50,
        epochs: int | None = None,
        batch_size: int = 256,
        lr: float = 0.01,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """Train a standard SVGP: RBF kernel with a lengthscale per input, constant mean.

        Works best on standardised inputs and targets. The same seed gives the same GP, and
        torch's global generator is left as it was.

        Args:
            x: Inputs ``(N, D)``; the GP computes in their dtype and on their device.
            y: Targets ``(N,)`` or ``(N, C)``; several outputs have independent GPs.
            inducing: Number of inducing points, at most ``N``; they start at rows of ``x`` and
                are learned.
            epochs: Passes over the data; by default as many as make about 1000 steps.
            batch_size: Rows per step.
            lr: Adam's learning rate.
            seed: Seed of the starting points and the order of rows.
            progress: Show a progress bar where there is a terminal.

        Raises:
            ValueError: Shapes do not fit, or values are not finite.
        """
        x, y = _checked(x.detach(), y.detach())
        devices = [x.device] if x.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=x.device.type if devices else "cuda"):
            torch.manual_seed(seed)
            rows = torch.randperm(len(x))[:inducing].to(x.device)
            model = _GP(x[rows], y, spread=x.std(0)).to(x)
            epochs = epochs or epochs_for(len(x), batch_size)
            noise = _train(model, x, y, _Training(epochs, batch_size, lr, progress))
        return cls(model.eval().requires_grad_(False), noise=noise)

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def forward(self, x: Batch) -> Gaussian:
        if not isinstance(x, Tensor):
            raise TypeError("a Gaussian process over the inputs takes them as one tensor (B, D)")
        # gpytorch multiplies matrices in the model and again when a variance is asked for.
        with full_precision(x):
            distribution = self.network(x)
            if not isinstance(distribution, MultivariateNormal):
                raise TypeError(
                    f"the model returned {type(distribution).__name__}; expected gpytorch's "
                    "MultivariateNormal, the distribution of the function at the inputs"
                )
            mean, variance = distribution.mean, distribution.variance
        if not isinstance(distribution, MultitaskMultivariateNormal):
            mean, variance = (t[:, None] if t.dim() == 1 else t.mT for t in (mean, variance))
        if mean.dim() != 2 or len(mean) != len(x):
            raise ValueError(
                f"the model's mean has shape {tuple(distribution.mean.shape)} for {len(x)} inputs; "
                "expected (B,), (C, B) for a batch of GPs, or (B, C) for a multitask GP"
            )
        # Rounding can make a variance near zero negative.
        return DiagonalGaussian(mean, variance.clamp_min(0))

    def choose_layers(
        self, choice: LayerChoice, x: Batch, seen: Trace | None = None
    ) -> list[Representation]:
        if choice not in ("auto", INPUT, [INPUT], (INPUT,)):
            raise ValueError(
                f"layers={choice!r}, but a gpytorch model has no layers to read; leave it at "
                "'auto', which takes the input. For a deep kernel use rgpr.posteriors.SVDKL"
            )
        return [Representation(INPUT)]

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # gpytorch caches results of earlier calls, and these caches stay on the old device.
        for module in self.network.modules():
            clear_cache_hook(module)
            if isinstance(module, gpytorch.models.ExactGP):
                module.prediction_strategy = None
        return self


class RBFKernel(gpytorch.kernels.RBFKernel):  # type: ignore[misc]
    """gpytorch's RBF kernel, computed in float64 and for each row on its own.

    gpytorch's kernel subtracts the mean of the batch from its inputs, so one input far away costs
    all others their digits.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        dtype, lengthscale = x1.dtype, self.lengthscale.double()
        x1, x2 = x1.double(), x2.double()
        if lengthscale.shape[-1] > 1:
            x1, x2 = x1 / lengthscale, x2 / lengthscale
            lengthscale = torch.ones_like(lengthscale[..., :1])
        if diag:
            distance = (x1 - x2).square().sum(-1)
            lengthscale = lengthscale.squeeze(-1)
        else:
            norms = x1.square().sum(-1)[..., :, None] + x2.square().sum(-1)[..., None, :]
            distance = (norms - 2 * x1 @ x2.mT).clamp_min(0)
        kernel: Tensor = (-0.5 * distance / lengthscale.square()).exp()
        return kernel.to(dtype)


class _GP(gpytorch.models.ApproximateGP):  # type: ignore[misc]
    """A sparse GP for each column of ``y``, with inducing points that start at ``points``.

    Args:
        points: Where the inducing points start, ``(M, D)``.
        y: Targets ``(N, C)``, whose mean and variance the prior starts from.
        spread: Standard deviation of each input, ``(D,)``, from which the lengthscales start.
    """

    def __init__(self, points: Tensor, y: Tensor, spread: Tensor) -> None:
        tasks = y.shape[1]
        batch = torch.Size([tasks] if tasks > 1 else [])
        strategy = VariationalStrategy(
            self,
            points.expand(*batch, *points.shape).clone(),
            CholeskyVariationalDistribution(len(points), batch_shape=batch),
            learn_inducing_locations=True,
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = RBFKernel(ard_num_dims=points.shape[1], batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        # The hyperparameters start in the units of the data, because gpytorch's defaults suit
        # standardised data only.
        scale = torch.where(spread > 0, spread, 1.0) * math.sqrt(points.shape[1])
        kernel.lengthscale = scale.expand_as(kernel.lengthscale)
        variance, mean = y.var(0).clamp_min(1e-6), y.mean(0)
        self.covar_module.outputscale = variance if tasks > 1 else variance[0]
        self.mean_module.constant.data.copy_(mean if tasks > 1 else mean[0])

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class _Training:
    """How :func:`_train` runs; see the arguments of :meth:`SVGP.fit`."""

    epochs: int
    batch_size: int
    lr: float
    progress: bool


def _train(model: _GP, x: Tensor, y: Tensor, how: _Training) -> Tensor:
    """Maximise the evidence lower bound, and return the variance of the noise, ``(C,)``."""
    tasks = y.shape[1]
    # gpytorch's batch dimension holds one GP per output, so its targets are (C, N).
    batch = torch.Size([tasks] if tasks > 1 else [])
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch)
    likelihood.noise = (0.1 * y.var(0)).clamp_min(1e-3).reshape(likelihood.noise.shape)
    targets = y.T if tasks > 1 else y[:, 0]
    likelihood.to(x)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=how.lr)
    for _ in bar(range(how.epochs), "svgp", how.progress):
        for rows in torch.split(torch.randperm(len(x)).to(x.device), how.batch_size):
            optimizer.zero_grad()
            loss = -objective(model(x[rows]), targets[..., rows]).sum()
            loss.backward()
            optimizer.step()
    return likelihood.noise.detach().reshape(tasks).clone()  # type: ignore[no-any-return]


def epochs_for(rows: int, batch_size: int, steps: int = 1000) -> int:
    """Number of passes over ``rows`` rows that take the optimiser about ``steps`` steps."""
    return math.ceil(steps / math.ceil(rows / batch_size))


def _checked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs ``(N, D)`` and targets ``(N, C)`` of one dtype and device.

    Raises:
        ValueError: Shapes do not fit, or values are not finite or not real.
    """
    y = y[:, None] if y.dim() == 1 else y
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y) or len(x) < 2:
        raise ValueError(
            f"inputs have shape {tuple(x.shape)} and targets {tuple(y.shape)}; expected (N, D) "
            "and (N,) or (N, C), with at least two rows"
        )
    if not x.is_floating_point():
        raise ValueError(f"inputs have dtype {x.dtype}; a GP takes real numbers, use x.float()")
    if not bool(x.isfinite().all() & y.isfinite().all()):
        raise ValueError("inputs or targets hold values that are not finite; remove these rows")
    return x, y.to(x)
