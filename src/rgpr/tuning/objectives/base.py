"""What an objective is, and the table of those that are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..._network.processes import active
from ...answers.examples import Examples, Parameters
from ...extension import Extension
from ..options import Options

__all__ = ["OBJECTIVES", "Data", "Objective"]


@dataclass(frozen=True)
class Data:
    """What an objective read, as the search sees it.

    Attributes:
        u: At the validation data, ``(N, L)``.
        mean: The base's outputs there, ``(N, C)``.
        target: Class indices ``(N,)``, labels or values ``(N, C)``.
        used: How many validation examples and outliers were kept.
        seen: How many there were.
        u_outliers: At the outliers, if there are any.
    """

    u: Tensor
    mean: Tensor
    target: Tensor
    used: tuple[int, int]
    seen: tuple[int, int]
    u_outliers: Tensor | None = None


# All objectives by name; subclasses of Objective enter themselves.
OBJECTIVES: dict[str, type[Objective]] = {}


class Objective(ABC):
    """What tuning maximises; made by one pass over the data, then evaluated without the network.

    Args:
        extension: The base and its residual.
        loader: Validation data.
        options: What the user asked for.

    Attributes:
        name: What ``model.tune(objective=...)`` calls it.
        takes_outliers: Whether there is a second term, of outliers, with a weight.
        takes_temperature: Whether its value depends on the temperature.
        of_shards: Whether several processes may each read a part of the data.
        starts: How many of the best starts are climbed.
        data: What was read.
        validation: The validation examples, if the objective keeps predictions of them.
        outliers: The outliers, likewise.
    """

    name: ClassVar[str]
    takes_outliers: ClassVar[bool] = False
    takes_temperature: ClassVar[bool] = True
    of_shards: ClassVar[bool] = True
    starts: ClassVar[int] = 3
    data: Data
    validation: Examples | None = None
    outliers: Examples | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            OBJECTIVES[cls.name] = cls

    @abstractmethod
    def __init__(self, extension: Extension, loader: Iterable[Any], options: Options) -> None:
        raise NotImplementedError

    @classmethod
    def check(cls, options: Options) -> None:
        """Refuse options that this objective has no use for.

        Raises:
            ValueError: The message names the option and what to use instead.
        """
        if options.ood is not None and not cls.takes_outliers:
            raise ValueError(f"outliers are given, but objective='{cls.name}' does not use them")
        if options.budgets and not cls.takes_outliers:
            raise ValueError(
                f"a budget chooses the weight of the outliers, and objective='{cls.name}' has none"
            )
        if options.temperature and not cls.takes_temperature:
            raise ValueError(
                f"objective='{cls.name}' does not depend on the temperature; use "
                "objective='likelihood' or 'ood', or wrap the base in rgpr.posteriors.Temperature"
            )
        if active() and not cls.of_shards:
            raise ValueError(
                f"objective='{cls.name}' needs all examples in one process; tune in one and share "
                "model.sigma2, or use objective='likelihood'"
            )

    @abstractmethod
    def parts(self, parameters: Parameters, weight: float) -> Iterable[Tensor]:
        """Numbers whose sum is the value; larger is better.

        Each is differentiated as it comes, so that no more than one is in memory.

        Args:
            parameters: Scales, temperature and noise.
            weight: The weight of the outliers; zero where there are none.
        """
        raise NotImplementedError
