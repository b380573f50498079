"""Posteriors of which only samples can be had, and those over weights in particular."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .._network.batches import Batch, arguments, copied
from .._network.outputs import outputs_of
from .base import Posterior
from .gaussian import EmpiricalGaussian, Gaussian

__all__ = ["SampledPosterior", "WeightPosterior", "normal_like", "seed_from"]

# Bytes of stacked weights that are evaluated together.
_STACK_BYTES = 1 << 28


class SampledPosterior(Posterior):
    """Outputs known by samples; :meth:`forward` takes their moments.

    The moments come from the same samples at every call, so predictions that need no samples of
    their own (probit, bridge, regression) are deterministic.

    Args:
        network: The network whose representations the residual reads.
        n_samples: Number of samples behind the moments.
        seed: Their seed.
    """

    def __init__(self, network: nn.Module, *, n_samples: int = 20, seed: int = 0) -> None:
        super().__init__(network)
        for name, number in (("n_samples", n_samples), ("seed", seed)):
            if not isinstance(number, int):
                raise TypeError(f"{name} = {number!r} is no whole number; pass an int such as 20")
        if n_samples < 2:
            raise ValueError(f"n_samples = {n_samples}; moments need at least two samples")
        self.n_samples, self.seed = n_samples, seed

    @abstractmethod
    def draw(
        self, x: Batch, point: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """Samples ``(S, B, C)``, given the network's own outputs ``point``."""

    def forward(self, x: Batch) -> Gaussian:
        point = self.point(copied(x))  # it may change its input in place, and there are more passes
        generator = torch.Generator().manual_seed(self.seed)
        return EmpiricalGaussian(self.draw(x, point, self.n_samples, generator))

    def sample(self, x: Batch, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        return self.draw(x, self.point(copied(x)), n_samples, generator)

    @property
    def no_graph(self) -> str | None:
        return "it predicts by random samples, which a graph does not hold"

    def _covariances_of_functions(self, x: Batch) -> Tensor:
        """For posteriors whose every sample is one function of all inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        samples = self.draw(x, self.point(copied(x)), self.n_samples, generator).double()
        root: Tensor = (samples - samples.mean(0)).permute(2, 1, 0) / max(
            1, self.n_samples - 1
        ) ** 0.5
        return root @ root.mT


class WeightPosterior(SampledPosterior):
    """A distribution over weights, evaluated sample by sample.

    Networks of linear layers alone run many samples at once, as one batched product; for
    convolutions, whose batched form is slower, and to bound memory, samples run in turn.
    """

    @abstractmethod
    def weights(self, generator: torch.Generator | None) -> Iterator[Mapping[str, Tensor]]:
        """Endless samples of the network's parameters (and buffers), by name."""

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        made: Any = cls
        made = made(network, tensors=tensors, **config)
        # One sample shows whether all tensors are there and fit each other.
        drawn = next(made.weights(torch.Generator().manual_seed(0)))
        for name, parameter in network.named_parameters():
            if name in drawn and drawn[name].shape != parameter.shape:
                raise ValueError(f"its samples of '{name}' have shape {tuple(drawn[name].shape)}")
        found: Self = made
        return found

    def draw(
        self, x: Batch, point: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        samples = islice(self.weights(generator), n_samples)

        def run(weights: Mapping[str, Tensor]) -> Tensor:
            positional, keywords = arguments(self.network, copied(x))
            returned = functional_call(self.network, dict(weights), positional, keywords)
            return outputs_of(returned, x, self.output)

        if not self._linear:
            return torch.stack([run(weights) for weights in samples])
        size = sum(p.numel() * p.element_size() for p in self.network.parameters())
        parts = []
        while chunk := list(islice(samples, max(1, _STACK_BYTES // max(1, size)))):
            stacked = {name: torch.stack([w[name] for w in chunk]) for name in chunk[0]}
            parts.append(vmap(run)(stacked))
        return torch.cat(parts)

    def covariances(self, x: Batch) -> Tensor:
        return self._covariances_of_functions(x)

    @property
    def _linear(self) -> bool:
        """Whether every layer with parameters is linear."""
        layers = [
            m for m in self.network.modules() if next(m.parameters(recurse=False), None) is not None
        ]
        return all(type(m) is nn.Linear for m in layers)


def normal_like(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Noise in the dtype of ``like``: weights need no float64, and there are many of them."""
    device = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype).to(like)


def seed_from(generator: torch.Generator) -> int:
    """A seed drawn from a generator, for what takes seeds and no generators."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))
