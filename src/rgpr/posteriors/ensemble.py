"""Deep ensembles: networks that were trained from different starts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._network.batches import Batch, copied
from .._network.outputs import outputs as outputs_of
from .._network.running import plain_module
from .base import register_posterior
from .sampled import SampledPosterior

__all__ = ["Ensemble"]


class Ensemble(SampledPosterior):
    """Each member is a sample. The residual reads the representations of the first.

    Sampling takes the members in turn, so that all count the same; it has no randomness.

    Saving takes members of one architecture, as loading makes them from one network.

    Args:
        networks: Two or more networks with the same outputs.
    """

    kind = "ensemble"

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        first, *others = _checked(networks)
        super().__init__(first, n_samples=1 + len(others))
        self.others = nn.ModuleList(plain_module(network) for network in others)

    def draw(
        self, x: Batch, point: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        others = list(self.others)[: n_samples - 1]
        outputs = [point, *(outputs_of(network, copied(x), self.output) for network in others)]
        for number, output in enumerate(outputs):
            if output.shape != point.shape:
                raise ValueError(
                    f"member {number} of the ensemble has {output.shape[1]} outputs and the first "
                    f"has {point.shape[1]}; members must agree on the classes"
                )
        return torch.stack([outputs[i % len(outputs)] for i in range(n_samples)])

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(network, 1 / self.n_samples) for network in (self.network, *self.others)]

    @property
    def no_graph(self) -> None:
        """Its samples are its members, in turn: nothing about them is random."""

    def covariances(self, x: Batch) -> Tensor:
        return self._covariances_of_functions(x)

    def config(self) -> dict[str, Any]:
        return {"members": self.n_samples}

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        if config["members"] - 1 > len(tensors):  # before so many networks are made
            raise ValueError(f"it names {config['members']} members and holds fewer")
        ensemble = cls([network, *(copy.deepcopy(network) for _ in range(config["members"] - 1))])
        ensemble.others.load_state_dict(
            {name.removeprefix("others."): tensor for name, tensor in tensors.items()}
        )
        return ensemble


def _checked(networks: Iterable[nn.Module]) -> list[nn.Module]:
    members = list(networks)
    if len(members) < 2:
        raise ValueError(f"an ensemble of {len(members)} networks; give two or more")
    for number, member in enumerate(members):
        if not isinstance(member, nn.Module):
            raise TypeError(
                f"member {number} of the ensemble is a {type(member).__name__}, not an nn.Module"
            )
    return members


register_posterior(list, Ensemble)
register_posterior(tuple, Ensemble)
