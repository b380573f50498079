r"""Stochastic variational deep kernel learning: Gaussian processes on a network's features.

One GP per output, with an RBF kernel on the standardised features :math:`\varphi(x)` and inducing
points :math:`Z`. With :math:`K_{ZZ} = L L^\top`, values :math:`u = L w` at them,
:math:`w \sim N(m, R R^\top)`, and :math:`A = L^{-1} k(Z, \varphi(x))`,

.. math:: f(x) \sim N\big(A^\top m,\; k(\varphi, \varphi) - \|A\|^2 + \|R^\top A\|^2\big),

fitted by maximising :math:`\sum_i E \log p(y_i \mid f(x_i)) - KL(q(w) \| N(0, I))`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, Self

import gpytorch
import torch
from torch import Tensor, nn

from .._backend.precision import full_precision
from .._network.checks import check_batch, network_dtype_device
from .._network.layers import LayerChoice, choose_layers
from .._network.loaders import labelled, on_device
from .._network.moments import Moments
from .._network.running import evaluating, plain_module
from ..residual.coordinates import Standardizer
from .base import THROUGH_ANOTHER_LIBRARY, Posterior
from .gaussian import DiagonalGaussian, Gaussian
from .gaussian_processes import (
    Batch,
    GaussianProcesses,
    class_labels,
    fit_variational,
    regression_targets,
)
from .svgp import RBFKernel, epochs_for

__all__ = [
    "SVDKL",
    "Batch",
    "GaussianProcesses",
    "class_labels",
    "fit_variational",
    "regression_targets",
]


class SVDKL(Posterior):
    """Independent Gaussian processes on the features of a network.

    The residual reads the extractor's layers, the last one included: it makes features here.
    Build one with :meth:`fit`; it predicts through gpytorch's kernels and cannot be saved.

    Args:
        extractor: Maps ``(B, ...)`` to features ``(B, D)``.
        standardizer: Of those features.
        gps: The GPs on standardised features.
        likelihood: What they were fitted for.
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
        """Fit the GPs, on features that are computed once, or together with the extractor.

        Args:
            extractor: A trained network without its last layer, see :meth:`split`. It is not
                changed.
            train_loader: Yields ``(x, y)``: class indices ``(B,)``, or for regression targets
                ``(B,)`` or ``(B, C)``.
            classes: Number of classes; by default one more than the largest label.
            likelihood: ``"classification"`` (softmax) or ``"regression"``.
            inducing: Inducing points per GP; they start at features of training rows.
            epochs: Passes over the data; by default as many as make about 1000 steps.
            batch_size: Rows per step on cached features.
            lr: Adam's learning rate; the extractor's is a tenth of it.
            train_extractor: Fine-tune a copy of the extractor too, in evaluation mode: dropout
                is off and BatchNorm keeps its statistics. Batches are then the loader's, which
                is read once per epoch.
            seed: Of the starting points, the order of rows and the samples.
            progress: Show a progress bar where there is a terminal.

        Raises:
            TypeError: Labels are not whole numbers.
            ValueError: Features are not one vector per input, labels are out of range, or
                something is not finite.
        """
        extractor = plain_module(extractor)
        if train_extractor:
            extractor = copy.deepcopy(extractor)
        device = network_dtype_device(extractor)[1]
        features_seen, targets_seen, moments, sizes = [], [], Moments(), []
        shape: torch.Size | None = None
        with torch.no_grad(), evaluating(extractor):
            for number, (x, y) in enumerate(
                labelled(train_loader, progress=progress, description="svdkl features")
            ):
                x = on_device(x, device)
                check_batch(number, x, extractor, shape)
                shape = x.shape[1:]
                features = _features(extractor(x), x)
                moments.update(features)
                features_seen.append(features)
                targets_seen.append(y.to(x.device))
                sizes.append(len(x))
        if not bool(moments.squares.isfinite().all()):
            raise ValueError("the extractor gives features that are not finite on training data")
        standardizer = Standardizer(moments.mean, moments.std, dtype=torch.float64)
        features, targets = torch.cat(features_seen), torch.cat(targets_seen)
        if likelihood == "classification":
            targets, outputs = class_labels(targets, classes)
            shift, scale = features.new_zeros(outputs).double(), features.new_ones(outputs).double()
        elif likelihood == "regression":
            targets = regression_targets(targets, len(features))
            outputs = targets.shape[1]
            shift, scale = targets.mean(0), targets.std(0)
            scale = torch.where(scale > 0, scale, 1.0)
        else:
            raise ValueError(
                f"likelihood={likelihood!r}; expected one of 'classification', 'regression'"
            )

        def prepared(y: Tensor) -> Tensor:
            return y if likelihood == "classification" else (y - shift) / scale

        def cached(generator: torch.Generator) -> Iterator[Batch]:
            order = torch.randperm(len(features), generator=generator).to(features.device)
            for rows in torch.split(order, batch_size):
                yield standardizer(features[rows].double()), prepared(targets[rows]), 0.0

        def anew(generator: torch.Generator) -> Iterator[Batch]:
            with evaluating(extractor):
                for x, y in labelled(train_loader, progress=False, description="svdkl"):
                    y = y.to(features.device)
                    if likelihood == "regression":
                        y = regression_targets(y, len(y))
                    x = on_device(x, device)
                    yield standardizer(_features(extractor(x), x).double()), prepared(y), 0.0

        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(features), generator=generator)[:inducing].to(features.device)
        points = standardizer(features[rows].double())
        per_epoch = len(features) / len(sizes) if train_extractor else batch_size
        gps = fit_variational(
            _rbf(features.shape[1], outputs),
            points.expand(outputs, *points.shape),
            anew if train_extractor else cached,
            rows=len(features),
            likelihood=likelihood,
            shift=shift,
            scale=scale,
            learn_points=True,
            epochs=epochs or epochs_for(len(features), math.ceil(per_epoch)),
            lr=lr,
            generator=generator,
            others=[{"params": list(extractor.parameters()), "lr": 0.1 * lr}]
            if train_extractor
            else [],
            description="svdkl",
            progress=progress,
        )
        return cls(extractor, standardizer, gps, likelihood)

    @staticmethod
    def split(network: nn.Module, head: str | None = None) -> nn.Module:
        """A copy of a network that returns what goes into its last linear layer.

        Args:
            network: The trained network; it is not changed.
            head: Name of the layer that makes the outputs; by default the linear layer that is
                defined last. What comes after it still runs.

        Raises:
            ValueError: There is no such layer, or nothing before it.
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

    def forward(self, x: Tensor) -> Gaussian:
        features = _features(self.network(x), x)
        with full_precision(x):
            mean, variance = self.gps(self.standardizer(features.double()))
        return DiagonalGaussian(mean.to(features.dtype), variance)

    def choose_layers(self, choice: LayerChoice, x: Tensor) -> list[str]:
        return choose_layers(self.network, choice, x, keep_last=True)


def _rbf(dimension: int, outputs: int) -> gpytorch.kernels.Kernel:
    batch = torch.Size([outputs])
    kernel = RBFKernel(batch_shape=batch)
    # Standardised points lie about sqrt(2 D) apart.
    kernel.lengthscale = math.sqrt(dimension)
    return gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)


def _features(output: Any, x: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the extractor returned {what} for {len(x)} inputs; expected features (B, D). End it "
            "with nn.Flatten(), or cut it from a network by SVDKL.split"
        )
    return output
