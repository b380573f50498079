"""Any function that returns samples of the outputs, as a posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Batch
from .sampled import SampledPosterior

__all__ = ["FunctionPosterior"]

SampleFunction = Callable[[Any, int, torch.Generator | None], Tensor]


class FunctionPosterior(SampledPosterior):
    """For whatever has no class here: hypernetworks, Markov chains, somebody's service.

    A function cannot be saved, so neither can this.

    Args:
        network: The network whose representations the residual reads.
        function: Of the inputs, as the model gets them, a number of samples and a generator (or
            ``None``); returns ``(S, B, C)``.
        n_samples: Number of samples behind the moments.
        seed: Their seed.
    """

    def __init__(
        self, network: nn.Module, function: SampleFunction, *, n_samples: int = 20, seed: int = 0
    ) -> None:
        super().__init__(network, n_samples=n_samples, seed=seed)
        self.function = function

    def draw(
        self, x: Batch, point: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        samples = self.function(x, n_samples, generator)
        if not isinstance(samples, Tensor) or samples.shape[:2] != (n_samples, len(point)):
            got = tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__
            raise ValueError(
                f"the function gave {got}; expected a tensor of shape (S, B, C) = "
                f"({n_samples}, {len(point)}, C)"
            )
        return samples
