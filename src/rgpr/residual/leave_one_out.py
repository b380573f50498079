r"""How far training inputs lie, each measured by statistics that leave it out.

Training inputs lie nearer to their own statistics than other data do: with a hundred examples and
a hundred units by a factor of three. What data like them will look like is what they look like to
the statistics of all the *others*. These have closed forms, so nothing is collected twice.

**Moments.** With ``n`` examples, mean :math:`\mu` and sum of squares :math:`S` of a unit, without
the example ``x`` they are :math:`\mu - \frac{x - \mu}{n - 1}` and
:math:`S - \frac{n}{n - 1} (x - \mu)^2`.

**Prototypes.** Let :math:`d = h - \mu_k` be the deviation from the example's own class of
:math:`n_k` examples. Without the example, that class is further away by the factor
:math:`\frac{n_k}{n_k - 1}`, and the scatter within classes is :math:`S - \frac{n_k}{n_k - 1} d
d^\top`. After shrinkage by :math:`\lambda` the matrix that distances are measured by is

.. math:: M = B - g\, d d^\top, \qquad B = \frac{1 - \lambda}{n - 1} S + \lambda \tau I, \qquad
          g = \frac{(1 - \lambda)\, n_k}{(n - 1)(n_k - 1)}

with :math:`\tau` the mean variance that is left. :math:`B` has the eigenvectors of :math:`S` for
every example, and the rank-one change is undone by the formula of Sherman and Morrison,

.. math:: e^\top M^{-1} e = e^\top B^{-1} e
          + \frac{g\, (e^\top B^{-1} d)^2}{1 - g\, d^\top B^{-1} d} .

So one eigendecomposition serves all examples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._network.moments import ClassMoments, Moments

__all__ = ["LeaveOneOut", "MomentsWithout", "PrototypesWithout"]

# Numbers that are worked on at a time.
_CHUNK = 1 << 22
# Numbers in the centers of classes that are worked on at a time.
_CENTERS = 1 << 20
# If less than this share of a sum is left after a subtraction, it is rounding and counts as zero.
_ROUNDING = 1e-10
# Rounding never lets a share of the variance that is left fall below this.
_LEAST = 1e-12


class LeaveOneOut:
    """Measures rows of the training data by the statistics of all others."""

    def __call__(self, rows: Tensor, y: Tensor, offset: Tensor | None) -> Tensor:
        """``u``: ``(B,)`` in float64.

        Args:
            rows: ``(B, ...)``, reduced as the statistics were.
            y: The class that each of them was counted in, ``(B,)``.
            offset: Where the features start.
        """
        flat = rows.flatten(1)
        size = max(1, _CHUNK // max(1, flat.shape[1]))
        parts = zip(torch.split(flat, size), torch.split(y, size), strict=True)
        distances = torch.cat([self._distances(h.double(), c) for h, c in parts])
        beyond = distances if offset is None else distances - offset.double()
        return beyond.clamp_min(0).pow(3).mean(1) / 3

    def counted(self, y: Tensor) -> Tensor:
        """Which rows have something to be measured by, ``(B,)``."""
        return torch.ones_like(y, dtype=torch.bool)

    def _distances(self, h: Tensor, y: Tensor) -> Tensor:
        """Sizes of the coordinates, ``(B, N)``."""
        raise NotImplementedError


class MomentsWithout(LeaveOneOut):
    """For :class:`rgpr.residual.coordinates.Standardizer`.

    Args:
        moments: The moments of all the data.
        r: Factor on the spread.
    """

    def __init__(self, moments: Moments, r: float) -> None:
        self._moments, self._r = moments, r

    def _distances(self, h: Tensor, y: Tensor) -> Tensor:
        moments, n = self._moments, self._moments.count
        deviation = h - moments.mean
        mean = moments.mean - deviation / (n - 1)
        squares = moments.squares - n / (n - 1) * deviation.square()
        # The sum has the rounding of deviations in the dtype of the data. What is left of it where
        # only this example moved a unit is that rounding, and no spread.
        rounding = 16 * moments.resolution * moments.squares
        std = (torch.where(squares > rounding, squares, 0.0) / (n - 1)).sqrt()
        std = torch.where(std <= moments.rounding(mean), torch.nan, std)
        # A unit that only this example moved is measured in the scale of the others.
        layer = std.nanmedian(1, keepdim=True).values.nan_to_num(1.0)
        return (h - mean).abs() / (self._r * torch.where(std.isnan(), layer, std))


class PrototypesWithout(LeaveOneOut):
    """For :class:`rgpr.residual.prototypes.Prototypes`; one class means whitening.

    Args:
        classes: Statistics of all the data.
        shrinkage: :math:`\\lambda`.
        r: Factor on the spread.
    """

    def __init__(self, classes: ClassMoments, shrinkage: float, r: float) -> None:
        self._counts, self._means, self._r = classes.counts, classes.means, r
        self._keep, self._least = 1 - shrinkage, max(shrinkage, _LEAST)
        covariance = classes.covariance
        self._seen = self._counts > 0
        self._origin = self._means.sum(0) / self._seen.sum()  # others are zero
        self._diagonal = covariance.dim() == 1
        self._values = covariance
        if not self._diagonal:
            self._values, self._axes = torch.linalg.eigh(covariance)
            self._values = self._values.clamp_min(0)

    def counted(self, y: Tensor) -> Tensor:
        return self._counts[y] > 1

    def _turned(self, h: Tensor) -> Tensor:
        """Rows along the principal axes, from the middle of the prototypes."""
        moved = h - self._origin
        return moved if self._diagonal else moved @ self._axes

    def _distances(self, h: Tensor, y: Tensor) -> Tensor:
        z, n, units = self._turned(h), self._counts.sum(), len(self._origin)
        d, own = z - self._turned(self._means[y]), self._counts[y][:, None]
        # An example that is alone in its class leaves the scatter as it is.
        away = torch.where(own > 1, own / (own - 1).clamp_min(1), 1.0)
        scatter = n * self._values
        left = scatter.sum() - away[:, 0] * d.square().sum(1)
        left = torch.where(left > _ROUNDING * scatter.sum(), left, 0.0)
        typical = (left / ((n - 1) * units))[:, None]
        typical = torch.where(typical > 0, typical, 1.0)
        ridge = self._least * typical
        if self._diagonal:
            without = (scatter - away * d.square()).clamp_min(0)
            inverse = 1 / (self._keep * without / (n - 1) + ridge)
        else:
            inverse = 1 / (self._keep * scatter / (n - 1) + ridge)
        g = self._keep * away / (n - 1)
        rest = (1 - g * (inverse * d * d).sum(1, keepdim=True)).clamp_min(_LEAST)
        nearest = torch.full_like(own, torch.inf)
        # In parts: of many classes the means alone fill the memory.
        size = max(1, _CENTERS // max(len(h), units))
        for classes in torch.split(self._seen.nonzero().flatten(), size):
            centers = self._turned(self._means[classes])
            squared = self._squared(z, inverse, centers)
            if not self._diagonal:
                weighted = inverse * d
                along = (weighted * z).sum(1, keepdim=True) - weighted @ centers.T
                squared = squared + g * along.square() / rest
            # The own class is further away by the factor, and the others are where they were.
            squared = torch.where(classes == y[:, None], away.square() * squared, squared)
            nearest = torch.minimum(nearest, squared.amin(1, keepdim=True))
        return (nearest.clamp_min(0) / units).sqrt() / self._r

    def _squared(self, z: Tensor, inverse: Tensor, centers: Tensor) -> Tensor:
        """Squared distances from some centers, ``(B, K)``, with other weights in each row."""
        weighted = inverse * z
        own = (weighted * z).sum(1, keepdim=True)
        return own - 2 * weighted @ centers.T + inverse @ centers.square().T
