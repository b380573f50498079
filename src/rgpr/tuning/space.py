"""Where the search looks: which parameters, in which units, between which bounds, from where."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..answers.examples import Parameters
from ..likelihoods import LabelLikelihood, Likelihood
from .objectives import Data
from .options import Options

__all__ = ["INPUT_FLOOR", "Space", "search_space"]

# Shared scales of all layers that are looked at first, as powers of ten of the typical variance.
_SCALES = range(-5, 4)
# Logarithms beyond this are as good as zero or infinity: 1e-10 and 1e10 times the typical value.
_BOUND = 23.0
# The input carries the guarantee: it keeps a variance of at least this much in typical units (at
# the 95 % quantile of the data), which no prediction notices and which is a thousand times more at
# ten times the distance.
INPUT_FLOOR = 1e-3
# Added variance can be traded for a lower temperature without end; so far and no further.
_TEMPERATURES = (0.05, 20.0)


@dataclass(frozen=True)
class Space:
    """Points are ``(log sigma2 typical, log T, log noise / unit)``; what is fixed is left out.

    Attributes:
        typical: The unit of each scale is one over this, ``(L,)``.
        temperature: The temperature, if it is fixed.
        noise: The variance of the observations, if it is fixed.
        noise_unit: Its unit, if it is searched.
    """

    typical: Tensor
    temperature: Tensor | None
    noise: Tensor
    noise_unit: float | None

    def parameters(self, z: Tensor) -> Parameters:
        """The parameters at a point."""
        count = len(self.typical)
        sigma2 = z[:count].exp() / self.typical
        rest = list(z[count:])
        temperature = rest.pop(0).exp() if self.temperature is None else self.temperature
        noise = rest.pop(0).exp() * self.noise_unit if self.noise_unit else self.noise
        return Parameters(sigma2, temperature, noise)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest point."""
        rest = [] if self.temperature is not None else [[math.log(t) for t in _TEMPERATURES]]
        rest += [[-_BOUND, _BOUND]] if self.noise_unit else []
        scales = [[-_BOUND, _BOUND] for _ in self.typical]
        scales[0][0] = math.log(INPUT_FLOOR)
        low, high = self.typical.new_tensor([*scales, *rest]).unbind(1)
        return low, high

    def point(self, parameters: Parameters) -> Tensor:
        """The inverse of :meth:`parameters`."""
        z = [*(parameters.sigma2 * self.typical).clamp_min(1e-300).log()]
        if self.temperature is None:
            z.append(parameters.temperature.log())
        if self.noise_unit:
            z.append((parameters.noise / self.noise_unit).log())
        return torch.stack(z)

    def starts(self, now: Parameters) -> list[Tensor]:
        """The present parameters, all layers on one scale, and each layer alone."""
        count = len(self.typical)
        present, tail = self.point(now).tensor_split([count])
        scales = [torch.full_like(present, power * math.log(10)) for power in _SCALES]
        for index in range(count if 1 < count <= 16 else 0):
            alone = torch.full_like(present, -_BOUND / 2)
            alone[index] = 0.0
            scales.append(alone)
        return [torch.cat([z, tail]) for z in (present, *scales)]


def search_space(
    data: Data, now: Parameters, likelihood: Likelihood, options: Options
) -> tuple[Space, Parameters]:
    """Units for every parameter from the data, and where the search stands.

    Args:
        data: What the objective read.
        now: The model's parameters.
        likelihood: What the outputs stand for.
        options: Which parameters are searched.
    """
    everywhere = data.u if data.u_outliers is None else torch.cat([data.u, data.u_outliers])
    typical = _typical(data.u)
    typical = torch.where(typical > 0, typical, _typical(everywhere)).clamp(1e-30, 1e30)
    typical = torch.where(everywhere.amax(0) > 0, typical, 1.0)
    unit = None
    if not isinstance(likelihood, LabelLikelihood) and options.noise is None:
        unit = float((data.target - data.mean).square().mean()) or 1.0
        now = replace(now, noise=now.noise + unit)
    fixed = None if options.temperature else now.temperature
    return Space(typical, fixed, now.noise, unit), now


def _typical(u: Tensor) -> Tensor:
    return u.quantile(0.95, dim=0)
