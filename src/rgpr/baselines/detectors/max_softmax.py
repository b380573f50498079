r"""One minus the largest probability: :math:`1 - \max_c \text{softmax}(f)_c`."""

from __future__ import annotations

from torch import Tensor

from ...likelihoods.labels import check_logits
from .base import Detector, register_detector

__all__ = ["MaxSoftmax"]


@register_detector("max-softmax")
class MaxSoftmax(Detector):
    r""":math:`1 - \max_c p_c`, by Hendrycks and Gimpel (2017).

    Ours, and not pytorch-ood's, because in float32 a probability near one is exactly one: its
    scores of confident inputs are ties. Here the sum over the other classes is kept.
    """

    def predict_logits(self, logits: Tensor) -> Tensor:
        check_logits(logits)
        logits = logits.double()
        top, index = logits.max(1, keepdim=True)
        others = (logits - top).exp().scatter(1, index, 0.0).sum(1)
        return others / (1 + others)
