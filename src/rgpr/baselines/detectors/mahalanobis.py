r"""The distance to the nearest class mean, :math:`(h - \mu_c)^\top \Sigma^{-1} (h - \mu_c)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..._network.batches import Batch
from ..._network.guards import evaluating
from ..._network.layers import LayerChoice, check_layers, choose_layers
from ..._network.moments import ClassMoments
from ..._network.representation import INPUT, Representation, names_of
from ..._network.running import capture
from .base import Detector, register_detector

__all__ = ["Mahalanobis"]


@register_detector("mahalanobis")
class Mahalanobis(Detector):
    r"""Squared Mahalanobis distance to the nearest class mean, by Lee et al. (2018).

    The covariance is shared by the classes, :math:`\Sigma = (1 - \lambda) S + \lambda\,
    \text{tr}(S)/D\, I` with :math:`S` the within-class covariance. Feature maps are averaged over
    their positions; the distances of several layers are added up.

    Ours, and not pytorch-ood's, because that keeps all features in memory and sums their products
    in float32 without dividing by their number, has no shrinkage beyond ``1e-6``, which a dead
    unit turns into the whole score, and reads several layers only of a list of consecutive
    modules, by a pass each. Here one pass reads all layers of any network.

    Args:
        network: A trained classifier that returns logits.
        layers: Hidden layers to read, as in :class:`rgpr.RGPR`, ``"auto"`` for the same stages;
            by default the penultimate features alone.
        shrinkage: The :math:`\lambda` above, between 0 and 1.
    """

    without_head = ", or choose layers"

    def __init__(
        self, network: nn.Module, layers: LayerChoice | None = None, *, shrinkage: float = 1e-3
    ) -> None:
        super().__init__(network)
        if layers is not None:
            check_layers(self.network, layers)
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage = {shrinkage}; expected a share between 0 and 1")
        self.choice, self.shrinkage = layers, shrinkage
        self._representations: list[Representation] = []
        self.means: list[Tensor] = []
        self.whitenings: list[Tensor] = []

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Class means and within-class covariance of each layer, in one pass in float64.

        Raises:
            ValueError: A class has no example, labels and logits do not agree, or the covariance
                has no inverse.
        """
        layers: list[Representation] = []
        moments: list[ClassMoments] = []
        with evaluating(self.network) as modes, modes:
            for number, (x, y) in enumerate(self._batches(train_loader, progress)):
                if number == 0:
                    layers = self._choose(x)
                features, logits = self._read(x, layers)
                classes = logits.shape[1]
                if int(y.min()) < 0 or int(y.max()) >= classes:
                    raise ValueError(
                        f"batch {number}: labels lie between {int(y.min())} and {int(y.max())}; "
                        f"with {classes} logits they must lie between 0 and {classes - 1}"
                    )
                moments = moments or [ClassMoments(classes) for _ in features]
                for moment, h in zip(moments, features, strict=True):
                    moment.update(h, y)
        if not moments:
            raise ValueError("the loader gave no example; is it empty?")
        missing = (moments[0].counts == 0).nonzero().flatten().tolist()
        if missing:
            raise ValueError(
                f"no training example is of the classes {missing}, so they have no mean; fit on "
                "data with every class that the network knows"
            )
        whitenings = [
            self._whitening(name, moment)
            for name, moment in zip(names_of(layers) or ["penultimate"], moments, strict=True)
        ]
        self._representations, self.whitenings = layers, whitenings
        self.means = [moment.means for moment in moments]
        return self

    @property
    def layers(self) -> list[str]:
        """Names of the hidden layers; none stands for the penultimate features."""
        return names_of(self._representations)

    def _choose(self, x: Batch) -> list[Representation]:
        """The hidden layers; none stands for the penultimate features."""
        if self.choice is None:
            return []
        layers = choose_layers(self.network, self.choice, x)[1:]
        if not layers:
            raise ValueError(
                f"layers={self.choice!r} chooses no hidden layer of this network; name some, or "
                "leave it out for the penultimate features"
            )
        return layers

    def _read(self, x: Batch, layers: list[Representation]) -> tuple[list[Tensor], Tensor]:
        if not layers:
            _, features, logits = self._watch_head(x)
            return [features.double()], logits
        takes = [_pooled] * (1 + len(layers))
        hidden = capture(self.network, [Representation(INPUT), *layers], takes, x)
        with hidden, hidden:
            logits = self._logits(x)
        return hidden.found[1:], logits

    def _whitening(self, layer: str, moment: ClassMoments) -> Tensor:
        """Inverse of the Cholesky factor of the covariance."""
        covariance = moment.scatter / moment.counts.sum()
        scale = covariance.diagonal().mean()
        covariance = (1 - self.shrinkage) * covariance
        covariance.diagonal().add_(self.shrinkage * scale)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed) or not bool(factor.isfinite().all()):
            raise ValueError(
                f"the covariance of the {len(covariance)} features of layer '{layer}' has no "
                f"inverse with shrinkage = {self.shrinkage}; raise it, or fit on more data"
            )
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        whitening: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        return whitening

    def _score(self, x: Batch) -> Tensor:
        if not self.means:
            raise RuntimeError("this Mahalanobis detector is not fitted; call fit(train_loader)")
        features, _ = self._read(x, self._representations)
        scores = features[0].new_zeros(len(features[0]))
        for h, means, whitening in zip(features, self.means, self.whitenings, strict=True):
            # One class at a time: all at once would take (B, C, D).
            distances = [((h - mean) @ whitening.T).square().sum(1) for mean in means]
            scores += torch.stack(distances).amin(0)
        return scores


def _pooled(h: Tensor) -> Tensor:
    """Means over positions in float64, in memory of their own."""
    h = h.double()
    return h.flatten(2).mean(2) if h.dim() > 2 else h.clone()
