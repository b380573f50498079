r"""Coordinates: in which space a representation's distance from the data is measured.

The residual of a representation is :math:`u(h) = \frac{1}{3N} \sum_i (|z_i| - c_i)_+^3` with
:math:`z = \psi(h)` a fixed map learned in one pass over the training data, and offsets ``c``. A
kernel composed with a fixed map is a kernel, so all of this stays a Gaussian process.

=============  ====================================================================================
coordinates    :math:`\psi(h)`
=============  ====================================================================================
moments        ``(h - mean) / std`` of every unit: the paper's
whitened       one number, the distance from the mean: the root of the mean squared deviation along
               principal axes, each in units of its own spread
prototypes     one number, the same distance from the nearest class mean, with the spread within
               classes: in hidden layers what is strange is often *nearer* to the overall mean than
               the data are
=============  ====================================================================================

A distance to the nearest of several points is continuous. The deviation from the nearest one is
not: its direction jumps where another becomes the nearest. That is why prototypes give one number.

Each can be taken of the ``raw`` representation (every entry a unit), of the ``pooled`` one (means
over positions: one number a channel), or of the pooled one divided by its length
(``normalised``). Normalised coordinates are bounded, so the input, which carries the theorem,
always uses moments of every entry.

**Units that never varied.** A dead unit or a constant pixel has no standard deviation to divide
by, yet its firing is strong evidence of a strange input. It is measured in the scale of its
layer: the median standard deviation of the units that did vary, or one if none did. A unit counts
as constant when its spread is within the rounding of its own values.

**Offsets** start the features at a distance from the origin. With the training maximum the kernel
is exactly zero between any input and every training point, so the posterior of the process is
exactly the base's plus the residual's prior: Proposition 1 without an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._backend.arithmetic import mean_cubes, pooled
from .._backend.buffers import StableBuffers
from .._backend.precision import at_least_float32
from .._backend.small_layers import Parts

__all__ = ["Coordinates", "Standardizer", "reduce"]


class Coordinates(StableBuffers):
    """A map of a representation ``(B, ...)`` to coordinates ``(B, N)``, with offsets ``(N,)``.

    Attributes:
        kind: The name under which it is saved.
        needed: The tensors it cannot do without.
        kinds: All of them by name; subclasses enter themselves.
        offset: Where the features start, or ``None`` for the origin.
    """

    kind: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    kinds: ClassVar[dict[str, type[Coordinates]]] = {}
    offset: Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:  # exporters make subclasses too, as stand-ins
            Coordinates.kinds[cls.kind] = cls

    def __init__(self, of: str, tensors: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Keep the tensors, or copies of them unless nobody else has them (``own``)."""
        super().__init__()
        self.of = of
        self.register_buffer("offset", None)
        for name, tensor in tensors.items():
            kept = tensor.detach().contiguous()
            copied = not own and kept.data_ptr() == tensor.data_ptr()
            self.register_buffer(name, kept.clone() if copied else kept)
        self._derive()

    def _derive(self) -> None:
        """Make what follows from the tensors and is not saved."""

    @property
    def joint_units(self) -> int:
        """How many units have a spread that was estimated jointly: few examples fit it too well."""
        return 1

    @property
    def parts(self) -> Parts | None:
        """Tensors with which a kernel measures this layer together with others, if it can."""
        return None

    @abstractmethod
    def unit_variance(self, h: Tensor) -> Tensor:
        """``u``: a third of the mean cube of what is beyond the offsets, ``(B,)`` in float64."""
        raise NotImplementedError

    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape that each of the needed tensors must have beside the others."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """What, beside its tensors, it takes to build this again; JSON."""
        return {"kind": self.kind, "of": self.of}

    @classmethod
    def from_saved(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Coordinates:
        """The inverse of saving: ``config()`` and the state."""
        kind = Coordinates.kinds[config["kind"]]
        for name in kind.needed:
            tensors[name]  # an incomplete file is a KeyError
        coordinates = kind.__new__(kind)
        Coordinates.__init__(coordinates, config["of"], tensors)
        return coordinates


class Standardizer(Coordinates):
    """Every unit's deviation from its mean, in its standard deviations: the paper's.

    Args:
        mean: ``(N,)``.
        std: ``(N,)``; a zero is replaced by the layer's own scale, see above.
        r: The paper's factor on the standard deviation; larger makes the residual flatter.
        dtype: Dtype to compute in, at least float32.
        of: ``"raw"``, ``"pooled"`` or ``"normalised"``.
    """

    kind = "moments"
    needed = ("mean", "scale")
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        *,
        r: float = 1.0,
        dtype: torch.dtype = torch.float32,
        of: str = "raw",
    ) -> None:
        varied = std > 0
        layer_scale = std[varied].median() if bool(varied.any()) else std.new_ones(())
        scale = r * torch.where(varied, std, layer_scale)
        dtype = at_least_float32(dtype)
        super().__init__(of, {"mean": mean.to(dtype), "scale": scale.to(dtype)})

    def forward(self, h: Tensor) -> Tensor:
        return (reduce(h, self.of) - self.mean).div_(self.scale)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.needed, (self.mean.numel(),))

    def spread_of(self, directions: Tensor) -> Tensor:
        """See :meth:`Prototypes.spread_of`, with the root of the mean squared coordinate."""
        back = directions * self.scale.double()
        slopes: Tensor = len(self.mean) ** 0.5 * torch.linalg.vector_norm(back, dim=1)
        return slopes

    def anchors(self) -> Tensor:
        """The mean as the one point from which distances are measured, ``(1, D)`` in float64."""
        return self.mean.double()[None]

    def unit_variance(self, h: Tensor) -> Tensor:
        # Raw, it is read where it lies, whatever the order of its dimensions.
        rows = h if self.of == "raw" else reduce(h, self.of)
        return mean_cubes(rows, self.mean, self.scale, self.offset)


def reduce(h: Tensor, of: str) -> Tensor:
    """The representation ``(B, C, ...)`` as vectors ``(B, D)``: raw, pooled or normalised."""
    flat = h.flatten(1) if of == "raw" or h.dim() == 2 else pooled(h)
    if of != "normalised":
        return flat
    flat = flat.to(at_least_float32(h.dtype))
    peak = flat.detach().abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return torch.nn.functional.normalize(flat / peak, dim=1)
