"""What is to be fitted: a base, which of its layers are read, and in which coordinates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._network import batches
from .._network.layers import LayerChoice, stand_in
from .._network.representation import Representation, parse_layer
from .._network.trace import Trace
from ..likelihoods import Likelihood
from ..posteriors import Posterior
from ..residual.collecting import Collector
from ..residual.recipes import ResidualRecipe, Strategy

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What is to be fitted.

    Attributes:
        posterior: The base.
        choice: Which representations are read.
        recipe: In which coordinates they are measured.
        likelihood: What the outputs stand for.
        source: The module whose output stands in for the input.
    """

    posterior: Posterior
    choice: LayerChoice
    recipe: ResidualRecipe
    likelihood: Likelihood
    source: str | None = None

    def choose(self, x: batches.Batch, seen: Trace | None = None) -> list[Representation]:
        """The representations that are read, the input first.

        Args:
            x: Inputs.
            seen: What the posterior's ``look`` gave for them, if it was called already.
        """
        if seen is None and self.source is not None:
            seen = self.posterior.look(x)
        first, *others = self.posterior.choose_layers(self.choice, x, seen)
        if seen is not None and self.source is not None:
            network = self.posterior.network
            first, module = stand_in(seen, self.source), network.get_submodule(self.source)
            for each in others.copy():
                name, number, goes_in = parse_layer(each.name)
                # What stands in for the input is no other layer, by none of its names.
                if network.get_submodule(name) is module and number in ("", "0") and not goes_in:
                    others.remove(each)
        elif self.recipe.input.of == "raw":
            first = replace(first, channel=1)  # every entry is a unit, in the order of the input
        return [first, *others]

    def collectors(self, layers: int) -> list[Collector]:
        """Statistics of so many representations, with nothing in them yet."""
        strategies = enumerate(self.strategies(layers))
        return [Collector(strategy, hidden=number > 0) for number, strategy in strategies]

    def strategies(self, layers: int) -> list[Strategy]:
        """How the coordinates of so many representations are made."""
        return [self.recipe.input] + [self.recipe.hidden] * (layers - 1)
