"""The training set of the Gaussian processes: inputs, the network's outputs, and its errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._network.checks import check_batch, network_dtype_device
from ..._network.guards import evaluating
from ..._network.kept import form_of
from ..._network.loaders import labelled, on_device
from ..._network.moments import Moments
from ..._network.outputs import outputs_of
from ..._network.sources import as_batches
from ...posteriors.gaussian_processes import Batch, Units, class_labels, regression_targets
from ...residual.coordinates import Standardizer

__all__ = ["TrainingSet", "collect", "joined"]


@dataclass(frozen=True)
class TrainingSet:
    """All rows of the training data, ready for Gaussian processes.

    Attributes:
        x: Inputs ``(N, D)``.
        f: The network's outputs ``(N, C)``.
        y: Class indices ``(N,)``, or for regression the residuals ``(N, C)`` divided by ``scale``.
        scale: Root mean square of each output's residuals, ``(C,)``; ones for classification.
        offsets: Logits ``(N, C)`` that are added to the GPs' values before the softmax; ``None``
            for regression.
        inputs: Standardises inputs.
        outputs: Standardises the network's outputs.
    """

    x: Tensor
    f: Tensor
    y: Tensor
    scale: Tensor
    offsets: Tensor | None
    inputs: Standardizer
    outputs: Standardizer

    @classmethod
    def of(cls, likelihood: str, x: Tensor, y: Tensor, f: Tensor) -> TrainingSet:
        """The training set for a likelihood, from inputs, targets and the network's outputs.

        Raises:
            TypeError: Labels are not whole numbers.
            ValueError: Targets do not fit the outputs or are not finite, or a network with a
                single output is to classify.
        """
        offsets: Tensor | None
        if likelihood == "classification":
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
            # The residuals are measured from zero, not from their mean, because the GP's prior
            # mean is zero.
            scale = residual.square().mean(0).sqrt()
            scale = torch.where(scale > 0, scale, 1.0)
            y, offsets = residual / scale, None
        return cls(x, f, y, scale, offsets, _standardizer(x), _standardizer(f))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def units(self) -> Units:
        """Units of the GPs' outputs, before the fit has found the noise."""
        zeros = torch.zeros_like(self.scale)
        return Units(self.scale, zeros, zeros)

    def points(self, rows: Tensor | slice) -> Tensor:
        """Standardised inputs and outputs of some rows side by side, ``(B, D + C)``."""
        return joined(self.inputs, self.outputs, self.x[rows], self.f[rows])

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of ``size`` rows that make one pass over all rows in random order."""
        order = torch.randperm(len(self), generator=generator).to(self.x.device)
        for rows in torch.split(order, size):
            offsets = 0.0 if self.offsets is None else self.offsets[rows]
            yield self.points(rows), self.y[rows], offsets


def joined(inputs: Standardizer, outputs: Standardizer, x: Tensor, f: Tensor) -> Tensor:
    """Standardised inputs and outputs side by side, ``(B, D + C)`` in float64."""
    return torch.cat([inputs(x.double()), outputs(f.double())], dim=1)


@torch.no_grad()
def collect(
    network: nn.Module, loader: Iterable[Any], description: str, progress: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``(N, D)``, targets, and the network's outputs ``(N, C)``, from one pass.

    Raises:
        ValueError: Inputs or the network's outputs are not finite, or shapes do not fit.
    """
    device = network_dtype_device(network)[1]
    loader = as_batches(loader, network)
    xs, ys, fs = [], [], []
    shape: torch.Size | None = None
    with evaluating(network) as modes, modes:
        for number, (x, y) in enumerate(
            labelled(loader, network, progress=progress, description=description)
        ):
            x = on_device(x, device)
            check_batch(number, x, network, shape)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"batch {number} has the parts {form_of(x)}; a Gaussian process over the "
                    "inputs takes them as one tensor"
                )
            shape = x.shape[1:]
            f = outputs_of(network(x.clone()), x)  # the network may change its input in place
            if not bool(f.isfinite().all()):
                raise ValueError(f"batch {number}: the network's outputs are not finite")
            xs.append(x.flatten(1))
            ys.append(y.to(x.device))
            fs.append(f)
    return torch.cat(xs), torch.cat(ys), torch.cat(fs)


def _standardizer(h: Tensor) -> Standardizer:
    """Standardises by the mean and standard deviation of each column of ``h``."""
    moments = Moments()
    moments.update(h)
    return Standardizer(moments.mean, moments.std, dtype=torch.float64)
