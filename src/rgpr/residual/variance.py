r"""The ReLU-GP residual: representations in, variance out.

Every representation has a DSCS kernel in the coordinates of :mod:`rgpr.residual.coordinates`, with
:math:`u_l(x) = k(\psi_l(h_l), \psi_l(h_l); 1)`; ``l = 0`` is the input and carries the theorem.
Two ways lead from the :math:`u_l` and the scales :math:`\sigma_l^2` to one variance:

- ``"sum"``, the paper's: :math:`v = \sum_l \sigma_l^2 u_l`. It is linear in :math:`\sigma^2`, so
  ``u`` is all that tuning ever needs of the network.
- ``"onset"``, the default: with :math:`G` the geometric mean of :math:`\sigma_l^2 u_l` over the
  hidden layers, :math:`A` their arithmetic mean with the input, and a small share :math:`\eta`,

  .. math:: v = s c\, (G + \eta A - \kappa)_+ ,

  with a slope :math:`c` that is one until a calibration changes it.

  It is exactly zero until the layers agree that an input is unusual, sets in continuously there,
  and grows cubically, since :math:`A` does.

Both are variances of Gaussian processes: the first of a sum of kernels, the second of that sum
times :math:`a(x)\, a(x')` for a fixed function :math:`a`; see the theory page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._backend.arithmetic import can_look, needs_derivatives
from .._backend.small_layers import Packing, Parts
from .coordinates import Coordinates

__all__ = ["AT_TWICE_THE_ONSET", "CLASS_UNIT", "SHARE", "Residual"]

# The weight of the arithmetic mean beside the geometric one. It carries the theorem where a layer
# is silent. From 0.001 to 0.01 it changes no detection that we measured; the more, the more an
# ordinary input pays for one rare pixel.
SHARE = 2.0**-10
# How many units the variance is at twice the strangeness of the onset: a fit sets it so, and a
# calibration at most so. It was chosen with the onset's quantile on other splits of the sets of the
# experiment `small-data`: high and steep costs no more likelihood at the data than low and flat,
# and protects better far away.
AT_TWICE_THE_ONSET = 6.0
# The unit of the variance of logits: the probit divides them by sqrt(2) where v is this.
CLASS_UNIT = 8 / math.pi


class Residual(Packing):
    """A kernel for each representation, their scales, and how they become one variance.

    Args:
        coordinates: One map per representation, the input's first.
        sigma2: Scales ``(L,)``; zeros by default, which switches the residual off.
        combine: ``"sum"`` or ``"onset"``.
        typical: The median of each ``u`` at data like the training data, ``(L,)``: the unit in
            which the score measures. Zero for a representation that never varied, which then has
            no part in geometric means. Ones by default.
        onset: :math:`\\kappa`; ``None`` for the sum. The slope starts at one.
        unit: :math:`s`.
    """

    coordinates: nn.ModuleList
    sigma2: Tensor
    typical: Tensor
    onset: Tensor | None
    slope: Tensor
    unit: Tensor

    def __init__(
        self,
        coordinates: Sequence[Coordinates],
        sigma2: Tensor | None = None,
        *,
        combine: str = "sum",
        typical: Tensor | None = None,
        onset: float = 1.0,
        unit: float = CLASS_UNIT,
    ) -> None:
        super().__init__()
        self.coordinates = nn.ModuleList(coordinates)
        device = next(coordinates[0].buffers()).device
        zeros = torch.zeros(len(coordinates), dtype=torch.float64, device=device)
        self.register_buffer("sigma2", zeros if sigma2 is None else sigma2.to(zeros))
        self.register_buffer("typical", zeros + 1 if typical is None else typical.to(zeros))
        start = None if combine == "sum" else torch.full_like(zeros[0], onset)
        self.register_buffer("onset", start)
        self.register_buffer("slope", torch.ones_like(zeros[0]))
        self.register_buffer("unit", torch.full_like(zeros[0], unit))

    def at(self, index: int) -> Coordinates:
        """The coordinates of one representation."""
        coordinates: Coordinates = self.coordinates[index]  # type: ignore[assignment]
        return coordinates

    def _parts(self) -> dict[int, Parts]:
        parts = {index: self.at(index).parts for index in range(1, len(self.coordinates))}
        return {index: part for index, part in parts.items() if part is not None}

    @property
    def exponents(self) -> Tensor:
        """Weights of the layers in the geometric mean, ``(L,)``: they sum to one.

        Hidden layers that varied and are not switched off share it; without any, the input has it.
        """
        return _equal_weights(self.typical, self.sigma2)

    def contributions(self, u: Tensor, *, finite: bool = False) -> Tensor:
        """``sigma2 * u``, ``(B, L)``, from ``u`` of that shape.

        Args:
            u: ``(B, L)``.
            finite: Whether all of ``u`` is taken for finite, which saves what the other values
                need. A row of ``u`` that is not finite then gives a number that is not finite
                either, and maybe not the right one. The same holds for the methods below.
        """
        if finite:
            return u * self.sigma2
        # A kernel that is switched off stays off, also where its u is infinite.
        parts = torch.where(self.sigma2 > 0, u, 0.0) * self.sigma2
        # An input that holds a NaN has no variance at all, not even where all kernels are off.
        return torch.where(u[..., :1].isnan(), torch.nan, parts)

    def joint(self, u: Tensor, *, finite: bool = False) -> Tensor:
        """``G + eta A``, ``(B,)``: what is compared with the onset."""
        return _joined(self.contributions(u, finite=finite), self.exponents, finite=finite)

    def beyond(self, u: Tensor, *, finite: bool = False) -> Tensor:
        """The variance in its unit, ``(B,)``: what is beyond the onset, or the whole sum."""
        if self.onset is None:
            return self.contributions(u, finite=finite).sum(-1) / self.unit
        return self.slope * (self.joint(u, finite=finite) - self.onset).clamp_min(0)

    def with_onset(self, onset: Tensor | None, slope: Tensor) -> Residual:
        """The same residual that sets in elsewhere; the coordinates are shared, not copied."""
        other = Residual.__new__(Residual)
        nn.Module.__init__(other)
        other.coordinates = self.coordinates
        scales = {"sigma2": self.sigma2, "typical": self.typical, "unit": self.unit}
        for name, buffer in (scales | {"onset": onset, "slope": slope}).items():
            other.register_buffer(name, buffer)
        return other

    def strangeness(self, u: Tensor, *, finite: bool = False) -> Tensor:
        """``r(x)``, ``(B,)``: the layers together, in units of their typical value at the data.

        It does not depend on ``sigma2`` nor the onset, so that what ranks inputs is fixed by the
        fit, whatever is tuned or calibrated later. That ``u`` is finite saves nothing here.
        """
        varied = self.typical > 0
        return _joined(u / torch.where(varied, self.typical, 1.0), _equal_weights(self.typical))

    def forward(self, u: Tensor, *, finite: bool = False) -> Tensor:
        """``v(x)``: ``(B,)`` in float64 from ``u`` of shape ``(B, L)``."""
        if self.onset is None:
            return self.contributions(u, finite=finite).sum(-1)
        return self.unit * self.beyond(u, finite=finite)

    def guaranteed(self) -> tuple[Tensor, float]:
        """Weights ``g`` and a start ``c`` with ``v / unit >= (g @ u - c)_+`` for every ``u``."""
        if self.onset is None:
            return self.sigma2 / self.unit, 0.0
        weights = SHARE * self.slope * self.sigma2 / len(self.sigma2)
        return weights, float(self.slope * self.onset)


def _equal_weights(*sizes: Tensor) -> Tensor:
    """Equal weights of the hidden layers of which all sizes are positive; the input's if none is.

    Args:
        sizes: Numbers of each layer, ``(L,)``.
    """
    if can_look(sizes[0]):  # outside of tensors a few numbers take less time
        layers = zip(*(size.tolist() for size in sizes), strict=True)
        flags = [False, *[min(layer) > 0 for layer in layers][1:]]
        flags[0] = not any(flags)
        weights = [flag / sum(flags) for flag in flags]
        return torch.tensor(weights, dtype=torch.float64, device=sizes[0].device)
    counted = torch.stack(sizes).amin(0) > 0
    index = torch.arange(len(counted), device=counted.device)
    hidden = counted & (index > 0)
    chosen = torch.where(hidden.any(), hidden, index == 0).double()
    return chosen / chosen.sum()


def _joined(parts: Tensor, exponents: Tensor, *, finite: bool = False) -> Tensor:
    """The weighted geometric mean of ``parts`` ``(B, L)`` plus a share of the arithmetic mean.

    Where one of the parts is not finite the sum is not either, ``finite`` or not.
    """
    # An infinite layer makes the arithmetic mean infinite by itself. Beside a silent layer, whose
    # zero silences the product, it would make the product NaN. (A bound would not do: the largest
    # float64 is infinite in an ONNX file, whose constants are float32.)
    bounded = parts if finite else torch.where(parts < torch.inf, parts, 1.0)
    if needs_derivatives(parts):  # The logarithm of zero has no derivative.
        silent = parts == 0
        logs = torch.xlogy(exponents, torch.where(silent, 1.0, bounded))
        logs = torch.where(silent & (exponents > 0), -torch.inf, logs)
    else:
        logs = torch.xlogy(exponents, bounded)  # zero where the exponent is
    return torch.add(logs.sum(-1).exp(), parts.sum(-1), alpha=SHARE / parts.shape[-1])
