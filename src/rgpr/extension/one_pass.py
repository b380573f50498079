"""One pass through the network: the base's outputs, and how far every representation is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .._backend.arithmetic import FASTER, all_finite, can_look
from .._backend.small_layers import Packed
from .._network.batches import Batch, Shape, copied, dtype_of, first_part, largest, zeroed
from .._network.checks import check_input
from .._network.guards import evaluating_or_not
from .._network.representation import Representation, names_of
from .._network.running import capture
from ..likelihoods import Likelihood
from ..posteriors import Posterior
from ..residual.variance import Residual

__all__ = ["Extension", "Reading", "together"]

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
        likelihood: What the outputs stand for.
        temperature: A number that logits are divided by.
        nan: What a row with a NaN gets: ``"propagate"`` or ``"raise"``.
    """

    posterior: Posterior
    residual: Residual
    representations: Sequence[Representation]
    input_shape: Shape
    likelihood: Likelihood
    temperature: Tensor
    nan: str = "propagate"

    @property
    def layers(self) -> list[str]:
        """Names of the representations, the input first."""
        return names_of(self.representations)

    @property
    def source(self) -> str | None:
        """The module whose output stands in for the input, which then holds ids."""
        return self.representations[0].source

    def read(self, x: Batch, run: Callable[[Batch], Any] | None = None) -> Reading[Any]:
        """Run the base on ``x``, and read every representation on the way.

        The network never sees a value that is not finite: it gets zeros in such rows.

        Args:
            x: ``(B, ...)``, or several such parts.
            run: What to run in place of the posterior; it must run the network.
        """
        network, source = self.posterior.network, self.source
        check_input(x, network, self.input_shape, measured=source is None)
        plain = isinstance(x, Tensor) and source is None
        like = x if isinstance(x, Tensor) else first_part(x)
        # Where there is plain torch alone, no layers are measured together.
        packed = self.residual.packed(like) if FASTER.get(like.device.type, True) else None
        takes: list[Any] = [c.unit_variance for c in self.residual.coordinates]
        if packed is not None:  # their rows wait for the end of the pass
            for index in packed.layers:
                takes[index] = self.residual.at(index).rows
        closed = self.posterior._closed if run is None else None
        head = None
        if closed is not None and closed.head is not None:
            head = network.get_submodule(closed.head)
        reading = capture(network, self.representations, takes, x, head)
        modes = evaluating_or_not(self.posterior)
        with modes, modes, reading, reading:
            columns = reading.found
            first = columns[0] if source is None else largest(network, x)
            if self.nan == "raise" and bool(first.isnan().any()):
                row = int(first.isnan().nonzero()[0])
                raise ValueError(
                    f"row {row} of the input holds a NaN; clean it, or use nan='propagate' to get "
                    "NaN for that row"
                )
            finite = None
            # One look, where it is free, saves most batches what rows that are not finite need.
            if not (can_look(first) and all_finite(first)):
                finite = first.detach().abs() < torch.inf  # half the launches of isfinite
            clean = copied(x) if finite is None else zeroed(network, x, finite)
            if closed is None:
                output = (run or self.posterior)(clean)
            else:
                mean = self.posterior.point(clean)
                output = closed.gaussian(*closed.given(mean, reading.features))
        u = together(columns, packed)
        u = u if finite is None else torch.where(finite[:, None], u, first[:, None])
        return Reading(output, u, like.dtype if plain else dtype_of(network, x))


def together(columns: Sequence[Tensor], packed: Packed | None) -> Tensor:
    """``u`` of every representation, ``(B, L)``, once the pass is done.

    Args:
        columns: ``u`` of each representation, ``(B,)``; of those that are packed their rows.
        packed: The layers that are measured together.
    """
    columns = list(columns)
    if packed is not None:
        for index, column in packed.unit_variances(dict(enumerate(columns))).items():
            columns[index] = column
    return torch.stack(columns, dim=1)
