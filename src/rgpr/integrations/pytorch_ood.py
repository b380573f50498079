"""The residual's score as a detector of pytorch-ood.

Its benchmarks, its metrics and its grid search then run it beside its own detectors. The other way
round, :mod:`rgpr.baselines.detectors` has some of its detectors over the readings of this library.

Example:
    >>> import torch
    >>> from pytorch_ood.metrics import OODMetrics
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> detector = RGPRDetector(network).fit([torch.randn(200, 2)])
    >>> metrics = OODMetrics()
    >>> known, unknown = torch.randn(50, 2), torch.full((5, 2), 9.0)
    >>> for x, y in [(known, torch.zeros(50)), (unknown, -torch.ones(5))]:
    ...     _ = metrics.update(detector(x), y)
    >>> metrics.compute()["AUROC"] > 0.9
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from pytorch_ood.api import (
    Detector,
    DetectorInfo,
    ModelNotSetException,
    Paper,
    RequiresFittingException,
    Task,
)
from torch import Tensor

from ..model import RGPR

__all__ = ["RGPRDetector"]


class RGPRDetector(Detector):
    """How strange an input is to a network, :meth:`rgpr.RGPR.score`, for pytorch-ood.

    It reads the input and several layers of the network, so it works on inputs alone and has no
    ``predict_logits`` or ``predict_features``. Neither labels nor outliers are needed.

    Args:
        model: A trained network that returns logits, anything else that :class:`rgpr.RGPR` takes,
            or an ``RGPR``, which may be fitted already.
        **options: For :class:`rgpr.RGPR`, such as ``layers``, if ``model`` is not one.

    Attributes:
        model: The :class:`rgpr.RGPR`, for probabilities, p-values and explanations.
    """

    requires_fit = True
    info: ClassVar[DetectorInfo] = DetectorInfo(
        tasks=frozenset({Task.CLASSIFICATION}),
        paper=Paper(
            title="An Infinite-Feature Extension for Bayesian ReLU Nets That Fixes Their "
            "Asymptotic Overconfidence",
            venue="NeurIPS",
            year=2021,
            url="https://arxiv.org/abs/2010.02709",
        ),
    )

    def __init__(self, model: Any, **options: Any) -> None:
        if model is None:
            raise ModelNotSetException(
                "model is None, and this detector reads layers of the network; pass the network"
            )
        if isinstance(model, RGPR) and options:
            raise TypeError(
                f"the model is an RGPR, which has its options already; leave out {sorted(options)} "
                "or pass the network itself"
            )
        self.model = model if isinstance(model, RGPR) else RGPR(model, **options)

    def fit(self, data_loader: Iterable[Any]) -> Self:
        """Learn the training inputs, in one pass over them.

        Args:
            data_loader: Yields ``(x, y)``. Rows with a negative label are outliers in pytorch-ood,
                and are left out as by its own detectors.

        Raises:
            ValueError: There is no row that is not an outlier.
        """
        self.model.fit(_known(data_loader), progress=False)
        return self

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Outlier scores of a batch, ``(B,)`` in float64: higher is stranger.

        Args:
            x: Inputs ``(B, ...)``, which are moved to the detector's device.

        Raises:
            RequiresFittingException: The detector was not fitted.
        """
        if self.model.residual is None:
            raise RequiresFittingException("this detector was not fitted; call fit(loader) first")
        device = self.device
        return self.model.score(x if device is None else x.to(device))


def _known(data_loader: Iterable[Any]) -> Iterator[Any]:
    """Batches without the rows that pytorch-ood calls unknown."""
    for batch in data_loader:
        if isinstance(batch, Tensor):
            yield batch
            continue
        x, y = batch
        known = y >= 0
        if bool(known.all()):
            yield x, y
        elif bool(known.any()):
            yield x[known], y[known]
