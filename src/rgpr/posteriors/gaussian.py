"""Gaussian distributions over a network's outputs, without forming what is not asked for.

Means keep the network's dtype. Variances, covariances and samples are float64: far from the data
they outgrow float32 by far.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

__all__ = [
    "DenseGaussian",
    "DiagonalGaussian",
    "EmpiricalGaussian",
    "Gaussian",
    "ScaledGaussian",
    "standard_normal",
    "symmetric_normal",
]


def standard_normal(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Float64 noise on the device of ``like``, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    return noise.to(like.device)


def symmetric_normal(
    n_samples: int, shape: tuple[int, int], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Standard normal noise ``(S, B, C)`` that prefers no class, for every ``S``.

    Among every ``C`` samples each class has the largest entry exactly once: independent vectors
    are shifted cyclically until their largest entries lie where they should. Which class that is
    has the same chance for all, so this is stratified sampling with strata of equal size, and every
    sample has the law of independent normals. A single output takes both signs in turn.

    Added to samples of a base that are independent of each other, no mean of any function of them
    has a larger variance than with independent noise. The members of an ensemble come in turn and
    are no such samples: what two of them make of the noise can be opposite, and then their errors
    add up instead of cancelling. For two members the variance of the probabilities was at most
    1.012 times that with independent noise in all cases that were searched, and that of the mean
    confidence of the samples up to 1.7 times.
    """
    rows, outputs = shape
    drawn = standard_normal((n_samples, rows, outputs), like, generator)
    strata = max(2, outputs)
    device = like.device if generator is None else generator.device
    blocks = (math.ceil(n_samples / strata), rows, strata)
    # A random order in each block, so that in a last one that is cut short none is preferred.
    order = torch.rand(blocks, generator=generator, device=device).argsort(-1).to(like.device)
    wanted = order.transpose(1, 2).flatten(0, 1)[:n_samples]  # (S, B)
    if outputs == 1:
        return drawn.abs() * (2 * wanted - 1)[..., None]
    shift = (drawn.argmax(-1) - wanted)[..., None]
    index = torch.arange(outputs, device=like.device)
    return drawn.gather(-1, (index + shift) % outputs)


class Gaussian(ABC):
    """A Gaussian for each of ``B`` inputs over ``C`` outputs.

    Attributes:
        mean: ``(B, C)``.
        variance: The covariance's diagonal, ``(B, C)``.
    """

    mean: Tensor
    variance: Tensor

    @property
    @abstractmethod
    def row_sums(self) -> Tensor:
        """The covariance times the vector of ones, ``(B, C)``."""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """``(B, C, C)``."""

    @abstractmethod
    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples with mean zero, ``(S, B, C)``."""

    def with_mean(self, mean: Tensor) -> Self:
        """The same covariance around another mean; this Gaussian stays as it is."""
        other = copy.copy(self)
        other.mean = mean
        return other

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples, ``(S, B, C)``."""
        return self.mean + self.noise(n_samples, generator)


class DiagonalGaussian(Gaussian):
    """Independent outputs.

    Args:
        mean: ``(B, C)``.
        variance: ``(B, C)``, or anything that broadcasts to it; zero for a point estimate.
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self.mean = mean
        self.variance = variance.to(mean.device, torch.float64).expand(mean.shape)

    @property
    def row_sums(self) -> Tensor:
        return self.variance

    @property
    def covariance(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        epsilon = standard_normal((n_samples, *self.mean.shape), self.mean, generator)
        return self.variance.sqrt() * epsilon


class DenseGaussian(Gaussian):
    """Any covariance.

    Args:
        mean: ``(B, C)``.
        covariance: ``(B, C, C)``, positive semi-definite up to rounding.
    """

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        self.mean = mean
        self._covariance = covariance.double()
        self.variance = self._covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def row_sums(self) -> Tensor:
        return self._covariance.sum(-1)

    @property
    def covariance(self) -> Tensor:
        return self._covariance

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        # One bad row must not make the decomposition of the whole batch fail.
        covariance = self._covariance
        finite = covariance.isfinite().all(-1).all(-1)[:, None, None]
        covariance = torch.where(finite, covariance, 0.0)
        # Eigenvectors, not Cholesky: semi-definite matrices are common and welcome.
        values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
        root = vectors * values.clamp_min(0).sqrt()[:, None, :]
        root = torch.where(finite, root, torch.nan)
        epsilon = standard_normal((n_samples, *self.mean.shape), self.mean, generator)
        return torch.einsum("bck,sbk->sbc", root, epsilon)


class EmpiricalGaussian(Gaussian):
    """The Gaussian with the mean and covariance of samples.

    Args:
        samples: ``(S, B, C)``; with a single sample the covariance is zero.
    """

    def __init__(self, samples: Tensor) -> None:
        self.mean = samples.mean(0)
        self._root = (samples - self.mean).double() / math.sqrt(max(1, len(samples) - 1))
        self.variance = self._root.square().sum(0)

    @property
    def row_sums(self) -> Tensor:
        return (self._root * self._root.sum(-1, keepdim=True)).sum(0)

    @property
    def covariance(self) -> Tensor:
        return torch.einsum("sbc,sbd->bcd", self._root, self._root)

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        shape = (n_samples, *self._root.shape[:2])
        return torch.einsum(
            "nsb,sbc->nbc", standard_normal(shape, self._root, generator), self._root
        )


class ScaledGaussian(Gaussian):
    """The outputs of another Gaussian, times a positive number.

    Args:
        gaussian: The other.
        scale: A tensor with one element.
    """

    def __init__(self, gaussian: Gaussian, scale: Tensor) -> None:
        self._gaussian, self._scale = gaussian, scale.double()
        self.mean = (gaussian.mean * self._scale).to(gaussian.mean.dtype)
        self.variance = gaussian.variance * self._scale.square()

    @property
    def row_sums(self) -> Tensor:
        return self._gaussian.row_sums * self._scale.square()

    @property
    def covariance(self) -> Tensor:
        return self._gaussian.covariance * self._scale.square()

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        return self._gaussian.noise(n_samples, generator) * self._scale
