r"""Residuals modelled by Gaussian processes that are fitted, unlike ours.

.. math:: \tilde f(x) = f_\mu(x) + \hat f(x), \quad \hat f \sim GP(0, k)
          \;\Longrightarrow\; \tilde f(x) \mid D \sim N(f_\mu(x) + m(x),\, v(x)),

with the posterior mean :math:`m` and variance :math:`v` of the GP given the residuals
:math:`y - f_\mu(x)`; for classification, given labels behind a softmax of :math:`\tilde f`. Each
output has its own GP. The versions differ in :math:`f_\mu` and :math:`k`:

- **GP-DSCS**: a network; DSCS kernels on inputs and on the network's outputs, added.
- **RIO** (Qiu et al., 2020): a network; RBF kernels on inputs and outputs, added.
- **Blight and Ott** (1975): a polynomial; an RBF kernel on inputs.

Regression with few rows is exact: :math:`L L^\top = K + \sigma^2 I`, :math:`A = L^{-1} k(X, x)`,
:math:`m = A^\top L^{-1} (y - f_\mu)`, :math:`v = k(x, x) - \|A\|^2`. All else has inducing points.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor, nn
from torch.nn import functional as F

from .._backend.precision import full_precision
from .._network.checks import check_batch, network_dtype_device
from .._network.loaders import labelled, on_device
from .._network.moments import Moments
from .._network.outputs import outputs_of
from .._network.running import evaluating, plain_module
from ..integrations.gpytorch import DSCSKernel
from ..posteriors.base import THROUGH_ANOTHER_LIBRARY, Posterior
from ..posteriors.gaussian import DiagonalGaussian, Gaussian
from ..posteriors.svdkl import (
    Batch,
    GaussianProcesses,
    class_labels,
    fit_variational,
    regression_targets,
)
from ..posteriors.svgp import RBFKernel, epochs_for
from ..residual.coordinates import Standardizer

__all__ = ["GPDSCS", "RIO", "BlightOtt", "GPResidual"]

# Rows up to which regression is exact: one Cholesky of 2000 rows takes a tenth of a second.
EXACT_ROWS = 2000
# Least variance of the noise, in units of the residuals' variance: keeps the matrix invertible.
_NOISE_FLOOR = 1e-4


class GPResidual(Posterior):
    """A network plus Gaussian processes for what it gets wrong. Subclasses write ``kernel``.

    Build one with :meth:`fit`. It predicts through gpytorch's kernels and cannot be saved.

    Args:
        network: The trained network.
        inputs: Standardises inputs.
        outputs: Standardises the network's outputs.
        gps: GPs on both, side by side: ``(B, N + C)``.
        likelihood: What they were fitted for.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Standardizer,
        outputs: Standardizer,
        gps: GaussianProcesses,
        likelihood: str,
    ) -> None:
        super().__init__(network)
        self.inputs, self.outputs, self.gps = inputs, outputs, gps
        self.likelihood = likelihood

    @classmethod
    @abstractmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        """A kernel of batch shape ``(outputs,)`` on ``inputs + outputs`` standardised columns."""

    @classmethod
    @torch.inference_mode(False)
    def fit(
        cls,
        network: nn.Module,
        train_loader: Iterable[Any],
        likelihood: str = "classification",
        *,
        inducing: int = 64,
        exact: bool | None = None,
        epochs: int | None = None,
        batch_size: int = 256,
        lr: float = 0.05,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """Fit the GPs to what the network leaves over. The network is not changed.

        Args:
            network: The trained network.
            train_loader: Yields ``(x, y)``: class indices ``(B,)``, or for regression targets
                ``(B,)`` or ``(B, C)``. Inputs are held in memory.
            likelihood: ``"classification"`` or ``"regression"``.
            inducing: Number of inducing points where the GPs are sparse: training rows, drawn
                evenly, shared by the outputs.
            exact: Regression without inducing points, at a cost cubic in the rows; by default up
                to 2000 of them.
            epochs: Passes over the data for sparse GPs, by default about 400 steps; steps of
                L-BFGS for exact ones, by default at most 50.
            batch_size: Rows per step for sparse GPs.
            lr: Adam's learning rate for sparse GPs.
            seed: Of the inducing points, the order of rows and the samples.
            progress: Show a progress bar where there is a terminal.

        Raises:
            TypeError: Labels are not whole numbers.
            ValueError: Shapes, labels or values that do not fit; exact classification.
        """
        network = plain_module(network)
        if likelihood not in ("classification", "regression"):
            raise ValueError(
                f"likelihood={likelihood!r}; expected one of 'classification', 'regression'"
            )
        x, y, f = _collect(network, train_loader, cls.__name__, progress)
        if likelihood == "classification":
            if exact:
                raise ValueError("exact=True is for regression; a softmax needs inducing points")
            if f.shape[1] < 2:
                raise ValueError(
                    "the network has one output; the softmax needs two or more. Give it one "
                    "output per class, or pass likelihood='regression'"
                )
            y, _ = class_labels(y, f.shape[1])
            scale, offsets = f.new_ones(f.shape[1]).double(), f
        else:
            y = regression_targets(y, len(x))
            if y.shape != f.shape:
                raise ValueError(
                    f"targets have shape {tuple(y.shape)} but the network's outputs have "
                    f"{tuple(f.shape)}; they must agree"
                )
            residual = y - f.double()
            # Around zero, not around their mean: the GP's prior mean is zero.
            scale = residual.square().mean(0).sqrt()
            scale = torch.where(scale > 0, scale, 1.0)
            y, offsets = residual / scale, None
            exact = len(x) <= EXACT_ROWS if exact is None else exact
        inputs, outputs = _standardizer(x), _standardizer(f)

        def points(rows: Tensor) -> Tensor:
            return _points(inputs, outputs, x[rows], f[rows])

        def batches(generator: torch.Generator) -> Iterator[Batch]:
            order = torch.randperm(len(x), generator=generator).to(x.device)
            for rows in torch.split(order, batch_size):
                yield points(rows), y[rows], 0.0 if offsets is None else offsets[rows]

        kernel = cls.kernel(x.shape[1], f.shape[1])
        if exact:
            everything = points(torch.arange(len(x), device=x.device))
            gps = _fit_exact(kernel, everything, y, scale, steps=epochs or 50)
        else:
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(x), generator=generator)[:inducing].to(x.device)
            gps = fit_variational(
                kernel,
                points(chosen),
                batches,
                rows=len(x),
                likelihood=likelihood,
                shift=torch.zeros_like(scale),
                scale=scale,
                # The kernels' derivatives in the points cost more than they give.
                learn_points=False,
                epochs=epochs or epochs_for(len(x), batch_size, steps=400),
                lr=lr,
                generator=generator,
                description=cls.__name__,
                progress=progress,
            )
        return cls(network, inputs, outputs, gps, likelihood)

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def forward(self, x: Tensor) -> Gaussian:
        f = self.point(x)
        with full_precision(x):
            mean, variance = self.gps(_points(self.inputs, self.outputs, x, f))
        return DiagonalGaussian(f + mean.to(f.dtype), variance)


class GPDSCS(GPResidual):
    """The paper's gold standard: the residual's own kernel, with a GP posterior."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        batch = torch.Size([outputs])
        on_inputs, on_outputs = _columns(inputs, outputs)
        return DSCSKernel(batch_shape=batch, active_dims=tuple(on_inputs)) + DSCSKernel(
            batch_shape=batch, active_dims=tuple(on_outputs)
        )


class RIO(GPResidual):
    """Residual estimation with an input-output kernel, of RBF kernels."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        on_inputs, on_outputs = _columns(inputs, outputs)
        return _rbf(on_inputs, outputs) + _rbf(on_outputs, outputs)


class BlightOtt(GPResidual):
    """Polynomial regression with a GP for its residual; it brings its own mean."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        return _rbf(range(inputs), outputs)

    @classmethod
    def fit(  # type: ignore[override]  # there is no network to be given
        cls,
        train_loader: Iterable[Any],
        likelihood: str = "regression",
        *,
        degree: int = 3,
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Fit the polynomial by least squares, then the GPs to its residuals.

        Args:
            train_loader: Yields ``(x, y)`` with targets ``(B,)`` or ``(B, C)``; read twice.
            likelihood: ``"regression"``.
            degree: Of the polynomial, which has powers of each input and no products.
            progress: Show a progress bar where there is a terminal.
            **options: As for :meth:`GPResidual.fit`.

        Raises:
            ValueError: Classification, or a negative degree.
        """
        if likelihood != "regression":
            raise ValueError(
                f"likelihood={likelihood!r}; a polynomial fitted by least squares is for "
                "regression. Use GPDSCS or RIO for classification"
            )
        if degree < 0:
            raise ValueError(f"degree = {degree} must be at least 0")
        pairs = list(labelled(train_loader, progress=progress, description="polynomial"))
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if not x.is_floating_point():
            raise TypeError(f"inputs have dtype {x.dtype}; use x.float()")
        polynomial = _Polynomial(x.flatten(1), regression_targets(y.to(x.device), len(x)), degree)
        return super().fit(polynomial, train_loader, likelihood, progress=progress, **options)


class _Polynomial(nn.Module):
    """Powers of the standardised inputs, weighted by least squares."""

    mean: Tensor
    scale: Tensor
    coefficients: Tensor

    def __init__(self, x: Tensor, y: Tensor, degree: int) -> None:
        super().__init__()
        self.degree = degree
        std = x.std(0, correction=0)
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("scale", torch.where(std > 0, std, 1.0))
        # The solution of least norm, as constant inputs make columns that depend on others.
        solution = torch.linalg.pinv(self._powers(x)) @ y
        self.register_buffer("coefficients", solution.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self._powers(x.flatten(1)) @ self.coefficients.double()).to(x.dtype)

    def _powers(self, x: Tensor) -> Tensor:
        z = (x.double() - self.mean) / self.scale
        ones = z.new_ones(len(z), 1)
        return torch.cat([ones, *(z**power for power in range(1, self.degree + 1))], dim=1)


def _fit_exact(
    kernel: Kernel, points: Tensor, y: Tensor, scale: Tensor, *, steps: int
) -> GaussianProcesses:
    """Hyperparameters by the marginal likelihood, then the posterior given all points."""
    kernel = kernel.to(points)
    raw_noise = points.new_full((len(scale),), -2.0).requires_grad_()
    eye = torch.eye(len(points), dtype=points.dtype, device=points.device)

    def state() -> tuple[Tensor, Tensor, Tensor]:
        noise = F.softplus(raw_noise) + _NOISE_FLOOR
        K = kernel(points).to_dense() + noise[:, None, None] * eye
        cholesky = torch.linalg.cholesky(K)
        weights = torch.linalg.solve_triangular(cholesky, y.T[..., None], upper=False).squeeze(-1)
        return cholesky, weights, noise

    optimizer = torch.optim.LBFGS(
        [raw_noise, *kernel.parameters()], max_iter=steps, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        optimizer.zero_grad()
        cholesky, weights, _ = state()
        logs = cholesky.diagonal(dim1=-2, dim2=-1).log().sum()
        value = (0.5 * weights.square().sum() + logs) / len(points)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        cholesky, weights, noise = state()
    zero = torch.zeros_like(scale)
    return GaussianProcesses(
        kernel,
        points,
        cholesky,
        weights,
        None,
        scale=scale,
        shift=zero,
        noise=scale.square() * noise,
    )


@torch.no_grad()
def _collect(
    network: nn.Module, loader: Iterable[Any], description: str, progress: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``(N, D)``, targets, and the network's outputs ``(N, C)``, from one pass."""
    device = network_dtype_device(network)[1]
    xs, ys, fs = [], [], []
    shape: torch.Size | None = None
    with evaluating(network):
        for number, (x, y) in enumerate(
            labelled(loader, progress=progress, description=description)
        ):
            x = on_device(x, device)
            check_batch(number, x, network, shape)
            shape = x.shape[1:]
            f = outputs_of(network(x.clone()), x)  # it may change its input in place
            if not bool(f.isfinite().all()):
                raise ValueError(f"batch {number}: the network's outputs are not finite")
            xs.append(x.flatten(1))
            ys.append(y.to(x.device))
            fs.append(f)
    return torch.cat(xs), torch.cat(ys), torch.cat(fs)


def _standardizer(h: Tensor) -> Standardizer:
    moments = Moments()
    moments.update(h)
    return Standardizer(moments.mean, moments.std, dtype=torch.float64)


def _points(inputs: Standardizer, outputs: Standardizer, x: Tensor, f: Tensor) -> Tensor:
    return torch.cat([inputs(x.double()), outputs(f.double())], dim=1)


def _columns(inputs: int, outputs: int) -> tuple[range, range]:
    return range(inputs), range(inputs, inputs + outputs)


def _rbf(columns: Sequence[int], outputs: int) -> gpytorch.kernels.Kernel:
    batch = torch.Size([outputs])
    # Standardised points lie about sqrt(2 D) apart. Without a limit a smooth residual drives
    # lengthscale and scale up together, until the matrix has no digits left.
    typical = math.sqrt(len(columns))
    kernel = RBFKernel(
        batch_shape=batch,
        active_dims=tuple(columns),
        lengthscale_constraint=Interval(1e-3 * typical, 10 * typical),
    )
    kernel.lengthscale = typical
    return ScaleKernel(kernel, batch_shape=batch)
