"""One pass through the network: the base's outputs, and how far every representation is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .._backend.arithmetic import FASTER
from .._network.checks import check_input
from .._network.representation import Representation, names_of
from .._network.running import capture, evaluating
from ..posteriors import Posterior
from ..residual.variance import Residual

__all__ = ["Extension", "Reading"]

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """What one pass gave for a batch of ``B`` inputs.

    Attributes:
        output: What was run: the base's Gaussian, or samples of it.
        u: Of every representation, the input first, ``(B, L)`` in float64. A row is infinite
            where its input is, and NaN where its input holds a NaN.
        dtype: The dtype of the input.
    """

    output: T
    u: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Extension:
    """A base posterior, its residual, and how both make an answer.

    Attributes:
        posterior: The base.
        residual: The residual.
        representations: What is read of the network, the input first.
        input_shape: Shape of one input.
        likelihood: ``"classification"`` or ``"regression"``.
        temperature: A number that logits are divided by.
        nan: What a row with a NaN gets: ``"propagate"`` or ``"raise"``.
    """

    posterior: Posterior
    residual: Residual
    representations: Sequence[Representation]
    input_shape: torch.Size
    likelihood: str
    temperature: Tensor
    nan: str = "propagate"

    @property
    def layers(self) -> list[str]:
        """Names of the representations, the input first."""
        return names_of(self.representations)

    def read(self, x: Tensor, run: Callable[[Tensor], Any] | None = None) -> Reading[Any]:
        """Run the base on ``x``, and read every representation on the way.

        The network never sees a value that is not finite: it gets zeros in such rows.

        Args:
            x: ``(B, ...)``.
            run: What to run in place of the posterior; it must run the network.
        """
        check_input(x, self.posterior.network, self.input_shape)
        # Where there is plain torch alone, no layers are measured together.
        packed = self.residual.packed(x) if FASTER.get(x.device.type, True) else None
        takes: list[Any] = [c.unit_variance for c in self.residual.coordinates]
        if packed is not None:  # their rows wait for the end of the pass
            for index in packed.layers:
                takes[index] = self.residual.at(index).rows
        with (
            evaluating(self.posterior),
            capture(self.posterior.network, self.representations, takes, x) as columns,
        ):
            first = columns[0]
            if self.nan == "raise" and bool(first.isnan().any()):
                row = int(first.isnan().nonzero()[0])
                raise ValueError(
                    f"row {row} of the input holds a NaN; clean it, or use nan='propagate' to get "
                    "NaN for that row"
                )
            finite = first.detach().abs() < torch.inf  # half the launches of isfinite
            clean = torch.where(finite.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)
            output = (run or self.posterior)(clean)
        if packed is not None:
            for index, column in packed.unit_variances(dict(enumerate(columns))).items():
                columns[index] = column
        u = torch.where(finite[:, None], torch.stack(columns, dim=1), first[:, None])
        return Reading(output, u, x.dtype)
