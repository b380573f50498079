r"""Virtual-logit matching: :math:`\alpha \|P^\perp (h - o)\| - \log \sum_c \exp f_c`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..._network.guards import evaluating
from .._pytorch_ood import pytorch_ood
from .base import Detector, register_detector

__all__ = ["ViM"]


@register_detector("vim")
class ViM(Detector):
    r"""Virtual-logit matching, by Wang et al. (2022): pytorch-ood's, on features read here.

    :math:`o = -W^+ b` is the point at which the last layer gives zero logits, :math:`P^\perp` the
    projection off the ``dim`` leading directions of the features around it, and :math:`\alpha`
    makes the virtual logit as large as the largest logit on average.

    Args:
        network: A trained classifier that returns logits and ends in an ``nn.Linear``.
        dim: Dimension of the principal space; by default 1000 for more than 1500 features, else
            512, as in the paper, but at most half of the features.

    Raises:
        ModuleNotFoundError: pytorch-ood is not installed.
    """

    def __init__(self, network: nn.Module, dim: int | None = None) -> None:
        super().__init__(network)
        if dim is not None and dim < 1:
            raise ValueError(f"dim = {dim}; the principal space needs a dimension of 1 or more")
        self.dim = dim
        self._build = pytorch_ood("ViM")
        self._fitted: Any = None

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """The principal space and the scale, from the features of all training examples.

        Raises:
            ValueError: ``dim`` leaves no direction for the residual.
        """
        rows, labels = [], []
        with evaluating(self.network) as modes, modes:
            for x, y in self._batches(train_loader, progress):
                head, features, _ = self._watch_head(x)
                rows.append(features.float())
                labels.append(y)
        if not rows:
            raise ValueError("the loader gave no example; is it empty?")
        features = torch.cat(rows)
        width = features.shape[1]
        dim = self.dim or max(1, min(1000 if width > 1500 else 512, width // 2))
        if dim >= width:
            raise ValueError(
                f"dim = {dim} of {width} features leaves no residual; choose a smaller one"
            )
        weight = head.weight.clone()  # training the network later must not change the detector
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias.clone()
        fitted = self._build(None, d=dim, w=weight, b=bias)
        self._fitted = fitted.fit_features(features, torch.cat(labels))
        return self

    def predict_features(self, features: Tensor) -> Tensor:
        if self._fitted is None:
            raise RuntimeError("this ViM detector is not fitted; call fit(train_loader)")
        scores: Tensor = self._fitted.predict_features(features)
        return scores.double()
