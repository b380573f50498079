r"""The free energy of the logits: :math:`-T \log \sum_c \exp(f_c / T)`."""

from __future__ import annotations

from torch import Tensor, nn

from .base import Detector, register_detector

__all__ = ["Energy"]


@register_detector("energy")
class Energy(Detector):
    r"""The free energy :math:`-T \log \sum_c \exp(f_c / T)`, by Liu et al. (2020).

    Ours, and not pytorch-ood's, which computes the same: one line of torch is not worth a package.

    Args:
        network: A trained classifier that returns logits.
        temperature: The :math:`T` above.
    """

    def __init__(self, network: nn.Module, temperature: float = 1.0) -> None:
        super().__init__(network)
        if not temperature > 0:
            raise ValueError(f"temperature = {temperature} must be positive")
        self.temperature = temperature

    def predict_logits(self, logits: Tensor) -> Tensor:
        return -self.temperature * (logits.double() / self.temperature).logsumexp(1)
