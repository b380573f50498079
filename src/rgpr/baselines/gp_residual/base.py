"""A network plus Gaussian processes for its errors: the contract and fit of every version."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from ..._network.batches import Batch
from ..._network.running import plain_module
from ...posteriors.base import THROUGH_ANOTHER_LIBRARY, Posterior
from ...posteriors.gaussian import DiagonalGaussian, Gaussian
from ...posteriors.gaussian_processes import GaussianProcesses, Variational, fit_variational
from ...posteriors.svgp import epochs_for
from ...residual.coordinates import Standardizer
from .exact import fit_exact
from .training_set import TrainingSet, collect, joined

__all__ = ["FitOptions", "GPResidual"]

# Rows up to which regression is exact: one Cholesky of 2000 rows takes a tenth of a second.
EXACT_ROWS = 2000


@dataclass(frozen=True)
class FitOptions:
    """How the Gaussian processes are fitted: the keywords of :meth:`GPResidual.fit`.

    Attributes:
        inducing: Number of inducing points where the GPs are sparse. They are training rows, drawn
            evenly and shared by the outputs.
        exact: Whether regression does without inducing points, at a cost cubic in the rows; by
            default it does for up to 2000 rows.
        epochs: For sparse GPs the passes over the data, by default as many as make about 400
            steps; for exact GPs the largest number of L-BFGS steps, by default 50.
        batch_size: Rows per step for sparse GPs.
        lr: Adam's learning rate for sparse GPs.
        seed: Seed of the inducing points, the order of rows and the samples.
        progress: Show a progress bar where there is a terminal.
    """

    inducing: int = 64
    exact: bool | None = None
    epochs: int | None = None
    batch_size: int = 256
    lr: float = 0.05
    seed: int = 0
    progress: bool = True

    def is_exact(self, likelihood: str, rows: int) -> bool:
        """Whether the GPs are fitted in closed form.

        A softmax has no closed form. Regression has one, and takes it if ``exact`` asks for it or
        if the rows are few.
        """
        if likelihood == "classification":
            return False
        return rows <= EXACT_ROWS if self.exact is None else self.exact


class GPResidual(Posterior):
    """A network plus Gaussian processes for its errors. Subclasses define :meth:`kernel`.

    Build the posterior with :meth:`fit`. It predicts through gpytorch's kernels, so it cannot be
    saved.

    Args:
        network: The trained network.
        inputs: Standardises inputs.
        outputs: Standardises the network's outputs.
        gps: GPs on standardised inputs and outputs side by side, ``(B, D + C)``.
        likelihood: The likelihood that the GPs were fitted for.
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
        """A kernel with batch shape ``(outputs,)`` on points with standardised columns.

        Args:
            inputs: Number of the network's inputs, which are the first columns.
            outputs: Number of the network's outputs, which are the columns after them.
        """

    @classmethod
    @torch.inference_mode(False)
    def fit(
        cls,
        network: nn.Module,
        train_loader: Iterable[Any],
        likelihood: str = "classification",
        **options: Any,
    ) -> Self:
        """Fit the GPs to the network's errors.

        Args:
            network: The trained network; it is not changed.
            train_loader: Yields ``(x, y)``: class indices ``(B,)``, or for regression targets
                ``(B,)`` or ``(B, C)``. Inputs are held in memory.
            likelihood: ``"classification"`` or ``"regression"``.
            **options: The fields of :class:`FitOptions`, such as ``epochs=20``.

        Raises:
            TypeError: Labels are not whole numbers, or an option is not a field of
                :class:`FitOptions`.
            ValueError: Shapes do not fit, labels are out of range, values are not finite, the
                likelihood is unknown, or ``exact=True`` was passed for classification.
        """
        how = FitOptions(**options)
        network = plain_module(network)
        if likelihood not in ("classification", "regression"):
            raise ValueError(
                f"likelihood={likelihood!r}; expected one of 'classification', 'regression'"
            )
        if how.exact and likelihood == "classification":
            raise ValueError("exact=True is for regression; a softmax needs inducing points")
        data = TrainingSet.of(
            likelihood, *collect(network, train_loader, cls.__name__, how.progress)
        )
        kernel = cls.kernel(data.x.shape[1], data.f.shape[1])
        if how.is_exact(likelihood, len(data)):
            gps = fit_exact(kernel, data, steps=how.epochs or 50)
        else:
            gps = _fit_sparse(kernel, data, likelihood, how, cls.__name__)
        return cls(network, data.inputs, data.outputs, gps, likelihood)

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def forward(self, x: Batch) -> Gaussian:
        if not isinstance(x, Tensor):
            raise TypeError("a Gaussian process over the inputs takes them as one tensor")
        f = self.point(x)
        # Points are float64, which autocast leaves alone, so there is no context without it.
        mean, variance = self.gps(joined(self.inputs, self.outputs, x, f))
        return DiagonalGaussian(f + mean.to(f.dtype), variance)


def _fit_sparse(
    kernel: Kernel, data: TrainingSet, likelihood: str, how: FitOptions, description: str
) -> GaussianProcesses:
    """Variational GPs, whose inducing points are training rows and do not move."""
    generator = torch.Generator().manual_seed(how.seed)
    chosen = torch.randperm(len(data), generator=generator)[: how.inducing].to(data.x.device)
    return fit_variational(
        kernel,
        data.points(chosen),
        data.units,
        partial(data.batches, how.batch_size),
        generator,
        Variational(
            rows=len(data),
            likelihood=likelihood,
            epochs=how.epochs or epochs_for(len(data), how.batch_size, steps=400),
            lr=how.lr,
            # The kernels' derivatives in the points cost more time than the fit gains by them.
            learn_points=False,
            description=description,
            progress=how.progress,
        ),
    )
