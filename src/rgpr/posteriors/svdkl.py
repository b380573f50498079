r"""Stochastic variational deep kernel learning: Gaussian processes on a network's features.

Each output :math:`c` has its own GP, with an RBF kernel on the standardised features
:math:`\varphi(x)`,

.. math:: f_c(x) = g_c(\varphi(x)), \qquad
          k_c(\varphi, \varphi') = s_c \exp\big(-\|\varphi - \varphi'\|^2 / 2 \ell_c^2\big).

The GPs :math:`g_c` have inducing points; ``gaussian_processes.py`` has their formulas and fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import gpytorch
import torch
from torch import Tensor, nn

from .._network.batches import Batch as Inputs
from .._network.batches import Shape, rows_of, run, shape_of
from .._network.checks import check_batch, network_dtype_device
from .._network.guards import evaluating
from .._network.layers import LayerChoice, choose_of
from .._network.loaders import labelled, on_device
from .._network.moments import Moments
from .._network.representation import Representation
from .._network.running import plain_module
from .._network.sources import as_batches, check_read_again
from .._network.trace import Trace
from ..residual.coordinates import Standardizer
from .base import THROUGH_ANOTHER_LIBRARY, Posterior
from .gaussian import DiagonalGaussian, Gaussian
from .gaussian_processes import (
    Batch,
    GaussianProcesses,
    Units,
    Variational,
    class_labels,
    fit_variational,
    regression_targets,
)
from .svgp import RBFKernel, epochs_for

__all__ = ["SVDKL"]


class SVDKL(Posterior):
    """Independent Gaussian processes on the features of a network.

    The residual does not leave out the extractor's last layer, as it does for other networks,
    because that layer makes features and not outputs. Build the posterior with :meth:`fit`. It
    predicts through gpytorch's kernels, so it cannot be saved.

    Args:
        extractor: Maps ``(B, ...)`` to features ``(B, D)``.
        standardizer: Standardises the features.
        gps: The GPs on standardised features.
        likelihood: The likelihood that the GPs were fitted for.
    """

    def __init__(
        self,
        extractor: nn.Module,
        standardizer: Standardizer,
        gps: GaussianProcesses,
        likelihood: str,
    ) -> None:
        super().__init__(extractor)
        self.standardizer, self.gps, self.likelihood = standardizer, gps, likelihood

    @classmethod
    @torch.inference_mode(False)
    def fit(
        cls,
        extractor: nn.Module,
        train_loader: Iterable[Any],
        *,
        classes: int | None = None,
        likelihood: str = "classification",
        inducing: int = 64,
        epochs: int | None = None,
        batch_size: int = 256,
        lr: float = 0.01,
        train_extractor: bool = False,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """Fit the GPs on features that are computed once, or together with the extractor.

        Args:
            extractor: A trained network without its last layer, see :meth:`split`. It is not
                changed.
            train_loader: Yields ``(x, y)``: class indices ``(B,)``, or for regression targets
                ``(B,)`` or ``(B, C)``.
            classes: Number of classes; by default one more than the largest label.
            likelihood: ``"classification"`` (softmax) or ``"regression"``.
            inducing: Number of inducing points of each GP. They start at features of training
                rows.
            epochs: Passes over the data; by default as many as make about 1000 steps.
            batch_size: Rows per step on cached features.
            lr: Adam's learning rate for the GPs; the extractor learns at a tenth of this rate.
            train_extractor: Fine-tune a copy of the extractor too, in evaluation mode: dropout
                is off and BatchNorm keeps its statistics. Each epoch then reads the loader
                again and takes its batches as they are.
            seed: Seed of the starting points, the order of rows and the samples.
            progress: Show a progress bar where there is a terminal.

        Raises:
            TypeError: Labels are not whole numbers.
            ValueError: Features are not one vector per input, labels are out of range, or
                inputs, features or targets are not finite.
        """
        extractor = plain_module(extractor)
        if train_extractor:
            check_read_again(train_loader, "train_extractor=True")
            extractor = copy.deepcopy(extractor)
        train_loader = as_batches(train_loader, extractor)
        data = _read(extractor, train_loader, progress)
        targets = _Targets.of(data, likelihood, classes)
        generator = torch.Generator().manual_seed(seed)
        points = data.points(inducing, generator)
        if train_extractor:
            batches = partial(_anew, extractor, train_loader, data, targets)
            rows_per_step = math.ceil(len(data) / data.batches)
            others = [{"params": list(extractor.parameters()), "lr": 0.1 * lr}]
        else:
            batches = partial(_cached, data, targets, batch_size)
            rows_per_step, others = batch_size, []
        outputs = len(targets.units.scale)
        gps = fit_variational(
            _rbf(data.features.shape[1], outputs),
            points.expand(outputs, *points.shape),
            targets.units,
            batches,
            generator,
            Variational(
                rows=len(data),
                likelihood=likelihood,
                epochs=epochs or epochs_for(len(data), rows_per_step),
                lr=lr,
                learn_points=True,
                description="svdkl",
                progress=progress,
                others=others,
            ),
        )
        return cls(extractor, data.standardizer, gps, likelihood)

    @staticmethod
    def split(network: nn.Module, head: str | None = None) -> nn.Module:
        """A copy of a network that returns the input of its last linear layer.

        Args:
            network: The trained network; it is not changed.
            head: Name of the layer that makes the outputs; by default the linear layer that is
                defined last. Layers after the head still run.

        Raises:
            ValueError: The network has no such layer, or is itself that layer.
        """
        network = plain_module(network)
        linear = [name for name, m in network.named_modules() if isinstance(m, nn.Linear)]
        name = head if head is not None else next(reversed(linear), None)
        if name is None or name not in dict(network.named_modules()):
            raise ValueError(
                f"the network has no layer '{head}'" if head else "the network has no linear layer"
            )
        if name == "":
            raise ValueError("the network is its last layer: there are no features before it")
        extractor = copy.deepcopy(network)
        extractor.set_submodule(name, nn.Identity())
        return extractor

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def forward(self, x: Inputs) -> Gaussian:
        features = _features(self.network, x)
        # Autocast leaves float64 alone, so the GPs need no context without it.
        mean, variance = self.gps(self.standardizer(features.double()))
        return DiagonalGaussian(mean.to(features.dtype), variance)

    def choose_layers(
        self, choice: LayerChoice, x: Inputs, seen: Trace | None = None
    ) -> list[Representation]:
        return choose_of(seen or self.look(x), choice, keep_last=True)


@dataclass(frozen=True)
class _TrainingData:
    """Features and targets of the training data, from one pass over the loader.

    Attributes:
        features: Features ``(N, D)``, as the extractor gave them.
        y: Targets of all rows, as the loader gave them.
        standardizer: Standardises features.
        batches: Number of batches that the loader gave.
    """

    features: Tensor
    y: Tensor
    standardizer: Standardizer
    batches: int

    def __len__(self) -> int:
        return len(self.features)

    def points(self, number: int, generator: torch.Generator) -> Tensor:
        """Standardised features of ``number`` rows drawn at random, ``(number, D)``."""
        rows = torch.randperm(len(self), generator=generator)[:number].to(self.features.device)
        points: Tensor = self.standardizer(self.features[rows].double())
        return points


@torch.no_grad()
def _read(extractor: nn.Module, loader: Iterable[Any], progress: bool) -> _TrainingData:
    """The training data, from one pass over the loader with the extractor in evaluation mode.

    Raises:
        ValueError: Features are not one vector per input, or inputs or features are not finite.
    """
    device = network_dtype_device(extractor)[1]
    features, targets, moments = [], [], Moments()
    shape: Shape | None = None
    with evaluating(extractor) as modes, modes:
        for number, (x, y) in enumerate(
            labelled(loader, extractor, progress=progress, description="svdkl features")
        ):
            x = on_device(x, device)
            check_batch(number, x, extractor, shape, measured=False)
            shape = shape_of(extractor, x)
            features.append(_features(extractor, x))
            moments.update(features[-1])
            targets.append(y.to(features[-1].device))
    if not bool(moments.squares.isfinite().all()):
        raise ValueError("the extractor gives features that are not finite on training data")
    standardizer = Standardizer(moments.mean, moments.std, dtype=torch.float64)
    return _TrainingData(torch.cat(features), torch.cat(targets), standardizer, len(features))


@dataclass(frozen=True)
class _Targets:
    """The targets in the form in which the GPs learn them.

    Attributes:
        likelihood: ``"classification"`` or ``"regression"``.
        values: Class indices ``(N,)``, or for regression standardised targets ``(N, C)``.
        units: Mean and standard deviation of regression targets; zero and one for classification.
    """

    likelihood: str
    values: Tensor
    units: Units

    @classmethod
    def of(cls, data: _TrainingData, likelihood: str, classes: int | None) -> _Targets:
        """The targets of all rows of the training data.

        Raises:
            TypeError: Labels are not whole numbers.
            ValueError: Labels are out of range, targets have the wrong shape or are not finite,
                or the likelihood is unknown.
        """
        if likelihood == "classification":
            labels, number = class_labels(data.y, classes)
            zeros = torch.zeros(number, dtype=torch.float64, device=data.features.device)
            return cls(likelihood, labels, Units(torch.ones_like(zeros), zeros, zeros))
        if likelihood == "regression":
            y = regression_targets(data.y, len(data))
            std = y.std(0)
            scale = torch.where(std > 0, std, 1.0)
            units = Units(scale, y.mean(0), torch.zeros_like(scale))
            return cls(likelihood, _standardised(y, units), units)
        raise ValueError(
            f"likelihood={likelihood!r}; expected one of 'classification', 'regression'"
        )

    def of_batch(self, y: Tensor) -> Tensor:
        """The targets of a batch that was read from the loader, in the form of ``values``."""
        if self.likelihood == "classification":
            return y.long()  # whatever whole numbers the loader gives
        return _standardised(regression_targets(y, len(y)), self.units)


def _standardised(y: Tensor, units: Units) -> Tensor:
    return (y - units.shift) / units.scale


def _cached(
    data: _TrainingData, targets: _Targets, size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """One epoch on the features that were read before, in random order."""
    order = torch.randperm(len(data), generator=generator).to(data.features.device)
    for rows in torch.split(order, size):
        yield data.standardizer(data.features[rows].double()), targets.values[rows], 0.0


def _anew(
    extractor: nn.Module,
    loader: Iterable[Any],
    data: _TrainingData,
    targets: _Targets,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """One epoch on features that the extractor, which is being trained, computes anew.

    The loader decides the order of rows, so the generator is not used.
    """
    device = network_dtype_device(extractor)[1]
    with evaluating(extractor) as modes, modes:
        for x, y in labelled(loader, extractor, progress=False, description="svdkl"):
            x = on_device(x, device)
            z = data.standardizer(_features(extractor, x).double())
            yield z, targets.of_batch(y.to(z.device)), 0.0


def _rbf(dimension: int, outputs: int) -> gpytorch.kernels.Kernel:
    """An RBF kernel with a scale and a lengthscale for each output."""
    batch = torch.Size([outputs])
    kernel = RBFKernel(batch_shape=batch)
    # Standardised points lie about sqrt(2 D) apart, so the lengthscale starts at that order.
    kernel.lengthscale = math.sqrt(dimension)
    return gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)


def _features(extractor: nn.Module, x: Inputs) -> Tensor:
    """The extractor's output for ``x``, if it is one vector for each input.

    Raises:
        ValueError: The output is something else.
    """
    output, rows = run(extractor, x), rows_of(x)
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != rows:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the extractor returned {what} for {rows} inputs; expected features (B, D). End it "
            "with nn.Flatten(), or cut it from a network by SVDKL.split"
        )
    return output
