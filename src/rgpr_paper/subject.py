"""A trained network of one set and seed with near and far outliers, and what one pass leaves.

The comparison with other detectors and that of other forms of the score have the same subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from rgpr.metrics import accuracy
from rgpr.model import RGPR

from .context import Context
from .data import ImageSet, Loader, notes_of
from .methods import Contestants, contestants
from .near_far import near_and_far
from .outputs import Outputs, head, outputs
from .rivals import Bench

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A model and all images that it is run on, each of them once.

    Attributes:
        competing: The network, its data, and this library's methods over it.
        model: The network's default residual over last-layer Laplace.
        last: The network's last linear layer.
        outliers: Near and far outliers, by where they are and by name.
        missing: For each set of outliers that is not there how to get it.
    """

    competing: Contestants
    model: RGPR
    last: nn.Linear
    outliers: dict[str, dict[str, ImageSet]]
    missing: dict[str, str]

    @classmethod
    def of(cls, context: Context, name: str, seed: int) -> Subject:
        """Train what is not there yet, and read the images.

        Args:
            context: How to run.
            name: The in-distribution set.
            seed: The network's seed.
        """
        outliers, missing = near_and_far(context, name)
        competing = contestants(context, name, seed)
        model = competing.method("LLL-RGPR-onset").model
        assert model is not None
        return cls(competing, model, head(model, competing.train), outliers, missing)

    def outputs(self, loader: Loader) -> Outputs:
        """Run the model once on every image of a loader."""
        return outputs(self.model, self.last, loader)

    @property
    def where(self) -> dict[str, list[str]]:
        """Names of the near and of the far outliers."""
        return {near_or_far: list(sets) for near_or_far, sets in self.outliers.items()}

    @cached_property
    def images(self) -> dict[str, Loader]:
        """Test images, as ``"test"``, and outliers by name."""
        kinds = {k: Loader(each.x) for sets in self.outliers.values() for k, each in sets.items()}
        return {"test": self.competing.test, **kinds}

    @cached_property
    def found(self) -> dict[str, Outputs]:
        """The network's outputs on :attr:`images`."""
        return {kind: self.outputs(loader) for kind, loader in self.images.items()}

    def bench(self, train: Outputs) -> Bench:
        """What detectors are fitted on.

        Args:
            train: The network's outputs on the training images.
        """
        return Bench(self.competing, self.last, train, self.outputs(self.competing.validation))

    def about(self) -> dict[str, Any]:
        """What a unit says of its subject: set, seed, images, layers, accuracy and choices."""
        competing, outliers = self.competing, self.outliers
        y = competing.test.y
        assert y is not None
        return {
            "set": competing.name,
            "seed": competing.seed,
            "classes": competing.classes,
            "notes": competing.notes | notes_of(outliers["near"]) | notes_of(outliers["far"]),
            "missing": self.missing,
            "sizes": {
                "train": len(competing.train.x),
                "validation": len(competing.validation.x),
                **{kind: len(loader.x) for kind, loader in self.images.items()},
            },
            "accuracy": accuracy(self.found["test"].logits.softmax(1), y),
            "layers": self.model.layers,
            "choices": [competing.choices],
        }
