"""Objectives that are a mean over validation examples, and perhaps a mean over outliers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._network.sources import check_read_again
from ...answers.examples import Examples, Parameters, Wanted, collect
from ...extension import Extension
from ...noise import NoiseLoader, like_data
from ..options import Options
from .base import Data, Objective

__all__ = ["PerExample"]


class PerExample(Objective):
    """A subclass says what one example is worth, and if it takes outliers, what one of them is.

    Attributes:
        likelihood: ``"classification"``, ``"multilabel"`` or ``"regression"``.
    """

    def __init__(self, extension: Extension, loader: Iterable[Any], options: Options) -> None:
        self.likelihood = extension.likelihood.name
        if self.takes_outliers and options.ood is None:
            check_read_again(loader, "making outliers from the validation data")
        generator = torch.Generator().manual_seed(options.seed)
        by_samples: dict[str, Any] = {"link": options.link_approx}
        if options.link_approx == "mc":
            by_samples |= {"n_samples": options.n_samples, "generator": generator}
        wanted = Wanted("rgpr tune", options.progress, at_most=options.max_examples, **by_samples)
        self.validation: Examples = collect(extension, loader, wanted)
        if self.takes_outliers:
            ood = options.ood
            if ood is None and extension.source is not None:
                raise ValueError(
                    "the input holds ids, of which no noise can be made; pass outliers, "
                    "ood=loader, such as texts of another kind"
                )
            if ood is None:
                network = extension.posterior.network
                ood = NoiseLoader(like_data, loader, seed=options.seed, network=network)
            # A generator may never end: as many outliers as there are examples will do.
            endless = not hasattr(ood, "__len__")
            of_outliers = Wanted(
                "rgpr tune, outliers",
                options.progress,
                targets="none",
                at_most=options.max_examples,
                stop_after=self.validation.seen if endless else None,
                **by_samples,
            )
            self.outliers = collect(extension, ood, of_outliers)
        sets = [self.validation, *([] if self.outliers is None else [self.outliers])]
        used, seen = [*map(len, sets), 0][:2], [*(s.seen for s in sets), 0][:2]
        self.data = Data(
            self.validation.u,
            self.validation.first,
            self.validation.labels,
            (used[0], used[1]),
            (seen[0], seen[1]),
            None if self.outliers is None else self.outliers.u,
        )

    @abstractmethod
    def value(self, examples: Examples, parameters: Parameters) -> Tensor:
        """What each of these validation examples is worth, ``(n,)`` or ``(n, C)``."""
        raise NotImplementedError

    def value_of_outliers(self, outliers: Examples, parameters: Parameters) -> Tensor:
        """What each of these outliers is worth, for an objective that takes them."""
        raise NotImplementedError

    def parts(self, parameters: Parameters, weight: float) -> Iterator[Tensor]:
        for examples in self.validation.chunks():
            yield self.value(examples, parameters).sum() / len(self.validation)
        if self.outliers is not None and weight > 0:
            for outliers in self.outliers.chunks():
                yield (
                    weight * self.value_of_outliers(outliers, parameters).sum() / len(self.outliers)
                )
