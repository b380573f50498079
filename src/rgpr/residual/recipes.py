"""Which coordinates each representation is measured in, and how they become one variance."""

from __future__ import annotations

from dataclasses import dataclass

from .._network.checks import one_of

__all__ = ["RESIDUALS", "ResidualRecipe", "Strategy"]


@dataclass(frozen=True)
class Strategy:
    """How the coordinates of one representation are made.

    Args:
        coordinates: ``"moments"``, ``"whitened"`` or ``"prototypes"``.
        of: ``"raw"``, ``"pooled"`` or ``"normalised"``.
        offset: The quantile of each coordinate's size on the training data at which the features
            start; 1 for its maximum, ``None`` for the origin. The maximum of moments is exact;
            other quantiles are those of an even sample of rows, 64 MiB at most.
        shrinkage: How far the covariance is shrunk; see :class:`Prototypes`.
    """

    coordinates: str = "moments"
    of: str = "raw"
    offset: float | None = None
    shrinkage: float = 0.1

    def __post_init__(self) -> None:
        one_of("coordinates", self.coordinates, ("moments", "whitened", "prototypes"))
        one_of("of", self.of, ("raw", "pooled", "normalised"))
        if self.offset is not None and not 0 < self.offset <= 1:
            raise ValueError(f"offset = {self.offset} is a quantile, above 0 and at most 1")
        if not 0 <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage = {self.shrinkage} is a share, from 0 to 1")


@dataclass(frozen=True)
class ResidualRecipe:
    """Strategies of a whole residual.

    Args:
        input: Strategy of the input; moments of every entry, so that the theorem holds.
        hidden: Strategy of all other representations.
        combine: How the representations become one variance: ``"sum"``, the paper's, or
            ``"onset"``, which is zero up to a bound on their geometric mean; see
            :class:`rgpr.residual.variance.Residual`.
    """

    input: Strategy = Strategy()
    hidden: Strategy = Strategy()
    combine: str = "sum"

    def __post_init__(self) -> None:
        one_of("combine", self.combine, ("sum", "onset"))
        if (self.input.coordinates, self.input.of) != ("moments", "raw"):
            raise ValueError(
                "the input needs coordinates='moments' of='raw': bounded coordinates do not grow "
                "with the input, and the confidence far away would not go to 1/C"
            )


RESIDUALS = {
    "onset": ResidualRecipe(hidden=Strategy("prototypes", "pooled"), combine="onset"),
    "paper": ResidualRecipe(),
}
