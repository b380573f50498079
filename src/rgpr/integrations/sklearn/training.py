r"""Train a small ReLU network on a table.

With the means :math:`m` and standard deviations :math:`s` of the columns, the network is trained on
:math:`z = (x - m) / s`. Afterwards its first layer takes :math:`W / s` and :math:`b - W (m / s)`,
which is the same function of :math:`x`. The targets of a regression are scaled likewise, by the
last layer. So the result is a plain ``nn.Sequential`` of linear layers and ReLUs over the columns.

Everything is float64, as scikit-learn's own networks are: the layers are small, so that it costs
little, and columns may lie far from zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Training", "relu_network"]


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes:
        hidden: Widths of the hidden layers.
        epochs: Passes over the rows.
        learning_rate: Of AdamW at the start; it falls to zero along a cosine.
        batch_size: Rows of one step.
        weight_decay: Of AdamW.
        seed: Of the weights and of the order of the rows.
        loss: Of outputs and targets.
    """

    hidden: Sequence[int]
    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float
    seed: int
    loss: Callable[[Tensor, Tensor], Tensor]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def train(self, x: Tensor, y: Tensor, outputs: int) -> nn.Sequential:
        """A network of columns ``x (N, D)``, trained on targets ``y``.

        The same seed gives the same network, and torch's own random numbers are left alone.

        Args:
            x: The rows in float64.
            y: Class indices ``(N,)``, or numbers ``(N, C)`` in float64.
            outputs: How many outputs the network has.
        """
        generator = torch.Generator().manual_seed(self.seed)
        network = relu_network([x.shape[1], *self.hidden, outputs], generator)
        center, scale = _standard(x)
        z = (x - center) / scale
        shift, unit = _standard(y) if y.is_floating_point() else (None, None)
        if shift is not None and unit is not None:
            y = (y - shift) / unit
        self._steps(network, z, y, generator)
        network.zero_grad()
        linear = [layer for layer in network if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            linear[0].weight.div_(scale)
            linear[0].bias.sub_(linear[0].weight @ center)
            if shift is not None and unit is not None:
                linear[-1].weight.mul_(unit[:, None])
                linear[-1].bias.mul_(unit).add_(shift)
        return network.eval()

    def _steps(self, network: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        optimizer = torch.optim.AdamW(
            network.parameters(), self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        total = self.epochs * math.ceil(len(x) / self.batch_size)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        for _ in range(self.epochs):
            order = torch.randperm(len(x), generator=generator)
            for rows in torch.split(order, self.batch_size):
                optimizer.zero_grad()
                self.loss(network(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                rate.step()


def relu_network(sizes: Sequence[int], generator: torch.Generator | None = None) -> nn.Sequential:
    """Linear layers of these widths in float64, with a ReLU between each two of them.

    Args:
        sizes: The number of columns, of units in each hidden layer, and of outputs.
        generator: Source of the weights.
    """
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        # Its own initialisation would draw from torch's random numbers.
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, following, dtype=torch.float64)  # type: ignore[no-untyped-call]
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    nn.init.zeros_(layer.weight)  # at first every output is the mean of the targets
    return nn.Sequential(*layers[:-1])


def _standard(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; one for a column that never varies."""
    center = values.mean(0)
    scale = values.std(0, correction=0)
    constant = scale <= 1e-12 * values.abs().amax(0)
    return center, torch.where(constant, torch.ones_like(scale), scale)
