"""Monte Carlo dropout: a network whose dropout stays on gives a sample at every pass."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._network.batches import Batch, arguments, copied
from .._network.outputs import outputs_of
from .sampled import SampledPosterior, seed_from

__all__ = ["MCDropout"]

# Dropout draws from the one source of the process: threads take turns.
_global_source = threading.Lock()


def _forked() -> None:
    """In a process that was forked: a thread that held the lock is gone."""
    global _global_source
    _global_source = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


class MCDropout(SampledPosterior):
    """Samples by dropout; normalisation layers stay in evaluation mode.

    The residual reads the representations of the network without dropout. Samples come from a
    twin that shares the network's parameters, so that the network's own modes stay untouched.

    Args:
        network: A network with dropout layers.
        n_samples: Number of samples behind the moments.
        seed: Their seed.
    """

    kind = "mc-dropout"

    def __init__(self, network: nn.Module, *, n_samples: int = 20, seed: int = 0) -> None:
        super().__init__(network, n_samples=n_samples, seed=seed)
        if not any(isinstance(m, nn.modules.dropout._DropoutNd) for m in self.network.modules()):
            raise ValueError(
                "the network has no dropout module, so every sample would be the same; functional "
                "dropout cannot be switched on from outside: use nn.Dropout modules"
            )
        shared = {id(t): t for t in (*self.network.parameters(), *self.network.buffers())}
        # In a tuple, so that it is no submodule: it has no state or mode of its own.
        self._twin = (copy.deepcopy(self.network, shared),)

    def draw(
        self, x: Batch, point: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        weights = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        (twin,) = self._twin
        for module in twin.modules():
            module.training = isinstance(module, nn.modules.dropout._DropoutNd)
        devices = [] if point.device.type == "cpu" else [point.device]
        run = torch.func.functional_call
        with _global_source, torch.random.fork_rng(devices, enabled=generator is not None):
            if generator is not None:
                # Dropout draws from the global source; seed it from the caller's.
                torch.manual_seed(seed_from(generator))
            passes = [run(twin, weights, *arguments(twin, copied(x))) for _ in range(n_samples)]
        return torch.stack([outputs_of(output, x, self.output) for output in passes])

    def config(self) -> dict[str, Any]:
        return {"n_samples": self.n_samples, "seed": self.seed}

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        return cls(network, **config)
