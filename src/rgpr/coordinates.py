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
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .data import Reservoir, one_of
from .fused import from_nearest, mean_cubes, nearest_cubes, peak_out, pooled
from .hooks import at_least_float32, full_precision
from .packed import Parts
from .standardize import ClassMoments, Moments, StableBuffers

__all__ = [
    "RESIDUALS",
    "Collector",
    "Coordinates",
    "Prototypes",
    "ResidualRecipe",
    "Standardizer",
    "Strategy",
]

# Bytes of rows that are kept to find a quantile of the coordinates.
_KEPT = 1 << 26
# Bytes of reduced batches that wait to be taken in together.
_TOGETHER = 1 << 22
# A covariance is formed of so many units at most; of more, the variances alone.
_WIDEST = 4096


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

    def __init__(self, of: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.of = of
        self.register_buffer("offset", None)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))
        self._derive()

    def _derive(self) -> None:
        """Make what follows from the tensors and is not saved."""

    @property
    def joint_units(self) -> int:
        """How many units have a spread that was estimated jointly: few examples fit it too well."""
        return 1

    @abstractmethod
    def unit_variance(self, h: Tensor) -> Tensor:
        """``u``: a third of the mean cube of what is beyond the offsets, ``(B,)`` in float64."""
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


class Prototypes(Coordinates):
    r"""The distance from the nearest prototype along principal axes, each in its own spread.

    .. math:: \rho(h) = \min_k \sqrt{\tfrac1D \, \| (h - \mu_k) A \|^2}

    With one prototype this is whitening. The nearest one is found by products of matrices, so
    thousands of them take no memory beyond a number for each pair. Rows are measured from the mean
    of the prototypes before they are multiplied: activations far from zero would otherwise lose
    their digits in differences of large products.

    Args:
        means: :math:`\mu`, ``(K, D)``.
        covariance: ``(D, D)``, within classes; or the variances alone, ``(D,)``, which leaves
            the axes where they are.
        shrinkage: Share of the mean variance that is put in place of each direction's own:
            directions that hardly varied would otherwise outweigh all others.
        r: Factor on the spread.
        dtype: Dtype to compute in, at least float32.
        of: ``"raw"``, ``"pooled"`` or ``"normalised"``.
    """

    kind = "prototypes"
    needed = ("axes", "centers", "origin")
    axes: Tensor
    centers: Tensor
    origin: Tensor
    onto: Tensor
    halves: Tensor

    def __init__(
        self,
        means: Tensor,
        covariance: Tensor,
        *,
        shrinkage: float = 0.1,
        r: float = 1.0,
        dtype: torch.dtype = torch.float32,
        of: str = "pooled",
    ) -> None:
        variances = covariance if covariance.dim() == 1 else covariance.diagonal()
        typical = variances.mean()
        typical = torch.where(typical > 0, typical, 1.0)
        if covariance.dim() == 1:
            values = (1 - shrinkage) * covariance + shrinkage * typical
            axes = values.clamp_min(1e-12 * typical).rsqrt() / r
        else:
            values, vectors = _principal(covariance, shrinkage, typical)
            axes = vectors * values.rsqrt() / r
        dtype = at_least_float32(dtype)
        means = means.to(axes.dtype)
        origin = means.mean(0).to(dtype)
        # Measured from the origin as it is stored, whose rounding then cancels.
        means = means - origin.to(axes.dtype)
        centers = means * axes if axes.dim() == 1 else means @ axes
        tensors = {"axes": axes.to(dtype), "centers": centers.to(dtype), "origin": origin}
        super().__init__(of, tensors)

    def _derive(self) -> None:
        dense = self.axes.dim() == 2
        with full_precision(self.axes):
            closeness = self.axes @ self.centers.T if dense else (self.axes * self.centers).T
        # One product gives the coordinates and how close each center is.
        onto = torch.cat([self.axes, closeness], 1) if dense else closeness
        self.register_buffer("onto", onto, persistent=False)
        self.register_buffer("halves", self.centers.square().sum(1) / 2, persistent=False)

    def _load_from_state_dict(self, *arguments):  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*arguments)
        self._derive()

    @property
    def joint_units(self) -> int:
        return len(self.origin)

    def forward(self, h: Tensor) -> Tensor:
        """The distance, ``(B, 1)`` in float64."""
        rows, peak = peak_out(self._rows(h) - self.origin)
        z = from_nearest(self._products(rows), self.centers, self.halves, peak).double()
        distance = z.square().mean(1, keepdim=True).sqrt() * peak.double()
        # An infinite entry is infinitely far, and not the NaN of its product with a zero.
        return torch.where(peak.isfinite(), distance, peak)

    def unit_variance(self, h: Tensor) -> Tensor:
        rows = self._rows(h) - self.origin
        if h.device.type == "cpu" and not torch.compiler.is_compiling():
            # Looking at a value costs nothing here: only rows that overflow need their peak out.
            u = nearest_cubes(self._products(rows), self.centers, self.halves, None, self.offset)
            finite = u.isfinite()
            return u if bool(finite.all()) else torch.where(finite, u, self._safely(rows))
        return self._safely(rows)

    def _safely(self, rows: Tensor) -> Tensor:
        rows, peak = peak_out(rows)
        return nearest_cubes(self._products(rows), self.centers, self.halves, peak, self.offset)

    @property
    def parts(self) -> Parts | None:
        """What can be packed with other layers, if it can and their rows can wait."""
        parts = Parts(self.origin, self.onto, self.centers, self.halves, self.offset)
        return parts if self.of != "raw" and parts.fit else None

    def rows(self, h: Tensor) -> Tensor:
        """What is to be measured of a representation, in memory of its own."""
        rows = self._rows(h)
        return rows.clone() if shares_memory(h, self.of) and rows.dtype == h.dtype else rows

    def spread_of(self, directions: Tensor) -> Tensor:
        r"""How much ``directions @ h`` can grow with the distance: bounds of its slope, ``(M,)``.

        For :math:`d = h - \mu_k` with coordinates :math:`z = d A`, a product :math:`w^\top d` is
        :math:`z A^{-1} w`, so :math:`|w^\top d| \le \sqrt D \rho\, \|A^{-1} w\|`.

        Args:
            directions: :math:`w`, ``(M, D)`` in float64.
        """
        axes = self.axes.double()
        back = directions / axes if axes.dim() == 1 else torch.linalg.solve(axes, directions.T).T
        slopes: Tensor = len(self.origin) ** 0.5 * torch.linalg.vector_norm(back, dim=1)
        return slopes

    def anchors(self) -> Tensor:
        """The prototypes as representations, ``(K, D)`` in float64."""
        axes, centers = self.axes.double(), self.centers.double()
        means = centers / axes if axes.dim() == 1 else torch.linalg.solve(axes.T, centers.T).T
        return means + self.origin.double()

    def _rows(self, h: Tensor) -> Tensor:
        return reduce(h, self.of).to(self.axes.dtype)

    def _products(self, rows: Tensor) -> Tensor:
        if self.axes.dim() == 2:
            return rows @ self.onto
        return torch.cat([rows * self.axes, rows @ self.onto], 1)


def _principal(covariance: Tensor, shrinkage: float, typical: Tensor) -> tuple[Tensor, Tensor]:
    """Variances along principal axes, after shrinkage, and the axes.

    Directions that never varied all end with the same variance, and rounding alone would choose
    axes among them. So units that never did are axes, and other such directions are found from
    fixed ones.
    """
    least = max(shrinkage, 1e-12) * typical
    still = covariance.diagonal() <= 1e-12 * least
    (live,), (dead,) = (~still).nonzero(as_tuple=True), still.nonzero(as_tuple=True)
    values, among = torch.linalg.eigh(covariance[live][:, live])
    values = ((1 - shrinkage) * values + shrinkage * typical).clamp_min(least)
    count = int((values <= least * (1 + 1e-6)).sum())  # in ascending order
    if count == len(live):
        among = torch.eye(count, dtype=among.dtype, device=among.device)
    elif count > 1:
        generator = torch.Generator().manual_seed(0)
        fixed = torch.randn(
            len(live), count, generator=generator, dtype=among.dtype, device="cpu"
        ).to(among.device)
        chosen = torch.linalg.qr(among[:, :count].T @ fixed).Q
        among = torch.cat([among[:, :count] @ chosen, among[:, count:]], 1)
    axes = torch.zeros_like(covariance)
    axes[dead, torch.arange(len(dead), device=dead.device)] = 1
    axes[live, len(dead) :] = among
    return torch.cat([least.expand(len(dead)), values]), axes


def reduce(h: Tensor, of: str) -> Tensor:
    """The representation ``(B, ...)`` as vectors ``(B, D)``: raw, pooled or normalised.

    Images ``(B, C, H, W)`` are pooled over positions, sequences ``(B, T, D)`` over ``T``.
    """
    flat = h.flatten(1) if of == "raw" or h.dim() == 2 else pooled(h)
    if of != "normalised":
        return flat
    flat = flat.to(at_least_float32(h.dtype))
    peak = flat.detach().abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return torch.nn.functional.normalize(flat / peak, dim=1)


def shares_memory(h: Tensor, of: str) -> bool:
    """Whether what :func:`reduce` gives is ``h`` itself, which the next layer may overwrite."""
    return of == "raw" or (of == "pooled" and h.dim() == 2)


@dataclass(frozen=True)
class Strategy:
    """How the coordinates of one representation are made.

    Args:
        coordinates: ``"moments"``, ``"whitened"`` or ``"prototypes"``.
        of: ``"raw"``, ``"pooled"`` or ``"normalised"``.
        offset: The quantile of each coordinate's size on the training data at which the features
            start; 1 for its maximum, ``None`` for the origin. The maximum of moments is exact;
            other quantiles are those of an even sample of rows, 64 MiB at most.
        shrinkage: Of the covariance; see :class:`Prototypes`.
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
            :class:`rgpr.residual.Residual`.
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


class Collector:
    """One representation's statistics, from one pass.

    Args:
        strategy: What they are for.
        r: Factor on the spread.
    """

    def __init__(self, strategy: Strategy, r: float = 1.0) -> None:
        self.strategy, self.r = strategy, r
        self.moments = Moments()
        self.classes: ClassMoments | None = None
        self.rows: Reservoir | None = None
        self.dtype = torch.float32
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    @property
    def needs_classes(self) -> bool:
        return self.strategy.coordinates == "prototypes"

    def reduce(self, h: Tensor) -> Tensor:
        """What :meth:`update` takes: memory of its own, unless it is read there and then."""
        self.dtype = h.dtype
        coordinates, of = self.strategy.coordinates, self.strategy.of
        if (coordinates, of) == ("moments", "raw"):
            return h
        waits = coordinates != "moments" and shares_memory(h, of)
        return reduce(h, of).clone() if waits else reduce(h, of)

    def merge(self, state: dict[str, Any], sign: int = 1) -> None:
        """Take in what another collector saw; see :attr:`state`.

        With the sign -1 its sums are taken out again; rows kept for quantiles stay.
        """
        self.dtype = state["dtype"]
        self.moments.merge(state["moments"], sign)
        if state["classes"] is not None:
            if self.classes is None:
                self.classes = ClassMoments(state["count"], diagonal=state["diagonal"])
            self.classes.merge(state["classes"], sign)
        if state["rows"] is not None and sign > 0:
            if self.rows is None:
                self.rows = Reservoir(state["kept"])
            self.rows.merge(state["rows"])

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        self._settle()
        classes, rows = self.classes, self.rows
        return {
            "dtype": self.dtype,
            "moments": self.moments.state,
            "classes": None if classes is None else classes.state,
            "count": None if classes is None else classes.classes,
            "diagonal": None if classes is None else classes.diagonal,
            "rows": None if rows is None else rows.state,
            "kept": None if rows is None else rows.size,
        }

    def update(self, h: Tensor, y: Tensor | None, classes: int) -> None:
        """Take in a batch that was reduced, with the class of each row."""
        exact = self.strategy.offset == 1 and self.strategy.coordinates == "moments"
        if self.strategy.coordinates == "moments":
            self.moments.update(h, extremes=exact)
        else:
            if self.classes is None:
                count, wide = classes if self.needs_classes else 1, h.shape[1] > _WIDEST
                self.classes = ClassMoments(count, diagonal=wide)
            if y is None or not self.needs_classes:
                y = torch.zeros(len(h), dtype=torch.long, device=h.device)
            self._waiting.append((h, y))
            self._bytes += h.nbytes
            # Many small batches are taken in as one: on a GPU each would be mostly waiting.
            if self._bytes > _TOGETHER:
                self._settle()
        if self.strategy.offset is not None and not exact:
            if self.rows is None:
                size = h[:1].numel() * h.element_size()
                self.rows = Reservoir(max(16, min(10_000, _KEPT // max(1, size))))
            # Rows of representations: the sample of shards is as even, not the same.
            self.rows.add(h)

    @property
    def total(self) -> Tensor:
        """A number that is not finite if anything that came in was not."""
        self._settle()
        return self.moments.total if self.classes is None else self.classes.total

    def _settle(self) -> None:
        if self._waiting and self.classes is not None:
            parts = self._waiting
            h, y = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            self.classes.update(h, y)
            self._waiting, self._bytes = [], 0

    def finish(self) -> Coordinates:
        """The map, with its offsets."""
        strategy, r, dtype = self.strategy, self.r, self.dtype
        self._settle()
        coordinates: Coordinates
        if self.classes is None:
            moments = self.moments
            coordinates = Standardizer(moments.mean, moments.std, r=r, dtype=dtype, of=strategy.of)
            if strategy.offset == 1:
                # By the very operations that a prediction does: not even rounding is left.
                ends = torch.stack([moments.low, moments.high]).to(coordinates.mean.dtype)
                coordinates.offset = ((ends - coordinates.mean) / coordinates.scale).abs().amax(0)
        else:
            seen = self.classes.counts > 0
            coordinates = Prototypes(
                self.classes.means[seen],
                self.classes.covariance,
                shrinkage=strategy.shrinkage,
                r=r,
                dtype=dtype,
                of=strategy.of,
            )
        if self.rows is not None and strategy.offset is not None:
            # Rows are reduced already.
            of, coordinates.of = coordinates.of, "raw"
            distances = coordinates(*self.rows.items).abs().sort(0).values
            coordinates.of = of
            index = min(len(distances) - 1, int(strategy.offset * len(distances)))
            coordinates.offset = distances[index].clone()
        return coordinates
