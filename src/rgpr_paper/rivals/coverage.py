r"""Neuron activation coverage, by Liu et al. (2024), which needs gradients and so runs on images.

The state of a neuron is :math:`\sigma(\alpha\, z\, \partial_z \text{KL}(1/C \,\|\, p))`, where
activation and gradient of a channel are each summed over positions. Each neuron has a histogram of
the states of 1000 training images. An input is the stranger, the emptier the bins are into which
its states fall: the score is the mean of :math:`-\min(\text{count} / O, 1)` over the neurons of a
layer, and over layers.

The detector ``NAC`` follows the authors' code, whose bins are narrow around a state of 1/2.
pytorch-ood's has bins that are narrow near zero and one, and takes means of products in place of
products of sums; it is listed beside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rgpr._network.guards import evaluating
from rgpr._network.representation import parse_layer
from rgpr._network.running import watching
from rgpr.baselines._pytorch_ood import pytorch_ood

from ..data import Loader, some
from .base import Bench, Fitted, Rival, register_rival

__all__ = ["Coverage", "CoverageLayer", "edges"]

# The authors draw this many training images, the same number of every class.
_IMAGES = 1000


@dataclass(frozen=True)
class CoverageLayer:
    """How the neurons of one layer are counted.

    Attributes:
        module: Its output holds the activations.
        full: The count ``O`` from which on a bin is full.
        bins: Number ``M`` of edges of the bins.
        alpha: Steepness of the sigmoid.
    """

    module: nn.Module
    full: int
    bins: int
    alpha: float


# The authors' configurations for ResNet-18, from the last layer to the first: O, M, alpha.
_PUBLISHED = {
    "cifar100": ((50, 50, 50.0), (500, 1000, 10.0), (500, 50, 1.0), (5, 50, 0.005)),
    "cifar10": ((50, 50, 100.0), (100, 500, 1000.0), (5, 50, 0.001), (100, 500, 0.001)),
}


def edges(bins: int, base: float = 1000.0) -> Tensor:
    """Edges of the bins, ``(bins,)`` in float64: narrow around 1/2, wide near zero and one."""
    half = torch.linspace(1, math.sqrt(base), bins // 2, dtype=torch.float64).log() / math.log(base)
    found = torch.cat([half[:-1], (1 - half).flip(0), half.new_tensor([1.2])])
    found[-2] += 0.01
    return found


class Coverage:
    """Histograms of neuron states.

    Args:
        network: A trained classifier that returns logits.
        layers: The layers that are counted.
    """

    def __init__(self, network: nn.Module, layers: Sequence[CoverageLayer]) -> None:
        self.network, self.layers = network, list(layers)
        self._filled: list[Tensor] = []

    def fit(self, x: Tensor) -> Coverage:
        """Count the states of training images, all of them in one histogram for each neuron."""
        counts: list[Tensor] = []
        for batch in Loader(x):
            bins = self._bins(batch)
            counts = counts or [
                each.new_zeros((each.shape[1], layer.bins - 1))
                for each, layer in zip(bins, self.layers, strict=True)
            ]
            for count, each in zip(counts, bins, strict=True):
                count.scatter_add_(1, each.T, torch.ones_like(each.T))
        self._filled = [
            (count / layer.full).clamp(max=1.0)
            for count, layer in zip(counts, self.layers, strict=True)
        ]
        return self

    def score(self, x: Tensor) -> Tensor:
        """How empty the bins of each input are, ``(B,)``, higher for stranger inputs."""
        covered = [
            filled.gather(1, each.T).mean(0)
            for filled, each in zip(self._filled, self._bins(x), strict=True)
        ]
        return -torch.stack(covered).mean(0)

    def _bins(self, x: Tensor) -> list[Tensor]:
        """The bin of every neuron's state, ``(B, N)`` for each layer."""
        found: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            found[module] = output

        with torch.enable_grad(), evaluating(self.network) as modes, modes:
            # The input asks for gradients, so that frozen weights do no harm.
            clean = x.clone().requires_grad_()
            hooks = watching(self.network, {layer.module: note for layer in self.layers})
            with hooks, hooks:
                logits = self.network(clean)
            outputs = [found[layer.module] for layer in self.layers]
            loss = -logits.log_softmax(1).mean(1).sum()
            gradients = torch.autograd.grad(loss, outputs)
        result = []
        for layer, output, gradient in zip(self.layers, outputs, gradients, strict=True):
            product = _summed(output.detach()) * _summed(gradient)
            states = torch.sigmoid(layer.alpha * product.double())
            index = torch.bucketize(states, edges(layer.bins).to(x.device), right=True) - 1
            result.append(index.clamp(0, layer.bins - 2))
        return result


def _summed(x: Tensor) -> Tensor:
    return x.flatten(2).sum(2) if x.dim() > 2 else x


def _stages(bench: Bench) -> list[str]:
    """Names of the layers that the residual reads, the last one first; not the input."""
    model = bench.competing.method("LLL-RGPR-onset").model
    assert model is not None
    names = [parse_layer(name)[0] for name in reversed(model.layers[1:])]
    if hasattr(bench.competing.network, "avgpool"):
        names[0] = "avgpool"  # its output is what goes into the head of a ResNet
    return names


def _published(bench: Bench) -> Fitted:
    network, name = bench.competing.network, bench.competing.name
    names = _stages(bench)
    settings = _PUBLISHED.get(name, _PUBLISHED["cifar10"])
    layers = [
        CoverageLayer(network.get_submodule(each), *setting)
        for each, setting in zip(names, settings, strict=False)
    ]
    detector = Coverage(network, layers).fit(_balanced(bench))
    shown = "; ".join(
        f"{each}: {layer.full}, {layer.bins}, {layer.alpha:g}"
        for each, layer in zip(names, layers, strict=True)
    )
    return Fitted(detector.score, f"{_IMAGES} training images; O, M and alpha: {shown}")


def _balanced(bench: Bench) -> Tensor:
    """Training images, the same number of every class."""
    train, seed = bench.competing.train, bench.competing.seed
    assert train.y is not None
    each = max(1, _IMAGES // bench.classes)
    parts = [some(train.x[train.y == label], each, seed) for label in range(bench.classes)]
    return torch.cat(parts)


def _of_pytorch_ood(bench: Bench) -> Fitted:
    network, names = bench.competing.network, _stages(bench)
    layers = [network.get_submodule(name) for name in names]
    detector = pytorch_ood("NACUE")(network, layers, m_bins=50, alpha=100.0, o_star=50)
    detector.fit(bench.competing.train)
    setting = f"all training images, 50 bins, alpha 100, O 50; {', '.join(names)}"
    return Fitted(detector.predict, setting)


register_rival(
    Rival(
        "NAC",
        "Liu et al. 2024",
        "this experiment",
        "images",
        trains=False,
        fit=_published,
        source="the authors' for CIFAR-10 and CIFAR-100, those for CIFAR-10 on other sets",
    )
)
register_rival(
    Rival(
        "NAC, pytorch-ood",
        "Liu et al. 2024",
        "pytorch-ood",
        "images",
        trains=False,
        fit=_of_pytorch_ood,
        source="pytorch-ood's defaults",
    )
)
