r"""Class means and the scatter within classes.

.. math:: \mu_c = \frac{1}{n_c} \sum_{y_n = c} h_n, \qquad
          S = \sum_n (h_n - \mu_{y_n})(h_n - \mu_{y_n})^\top

Batches are reduced around their own means and merged by the pairwise rule, in float64, as in
:mod:`rgpr.standardize`: the result does not depend on the size or the order of the batches beyond
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ClassMoments"]


class ClassMoments:
    """Running moments of features ``(B, D)`` with labels.

    Attributes:
        counts: Examples of each class, ``(C,)``.
        means: Mean of each class, ``(C, D)``; zero for one that was not seen.
        scatter: Sum of the outer products of the deviations, ``(D, D)``.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.means = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, dtype=torch.float64)

    def update(self, h: Tensor, y: Tensor) -> None:
        """Take in a batch of features and the class index of each."""
        h = h.double()
        counts = torch.bincount(y, minlength=self.classes).double()
        means = h.new_zeros(self.classes, h.shape[1]).index_add_(0, y, h)
        means = means / counts.clamp_min(1)[:, None]
        deviations = h - means[y]
        scatter = deviations.T @ deviations
        if self.counts.numel() == 0:
            self.counts, self.means, self.scatter = counts, means, scatter
            return
        total = self.counts + counts
        delta = means - self.means
        share = (counts / total.clamp_min(1))[:, None]
        self.scatter += scatter + delta.T @ (delta * share * self.counts[:, None])
        self.means = self.means + delta * share
        self.counts = total
