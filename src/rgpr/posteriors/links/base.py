"""What a link is, and the table of those that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..gaussian import Gaussian

__all__ = ["LINKS", "Link", "register_link"]

Logits = Callable[[Gaussian, Tensor, Tensor | float], Tensor]


@dataclass(frozen=True)
class Link:
    """A way from Gaussian outputs to class probabilities.

    Attributes:
        logits: ``logits(gaussian, v, temperature)`` gives ``(B, C)``, of which the softmax is the
            answer. ``v`` is added to the variance of every output, ``(B,)``. Without any variance
            and at temperature 1 the logits should be the mean, bit by bit.
        needs_covariance: Whether the logits depend on more than the mean and the variances.
            Tuning keeps these alone of each example, so such a link cannot be tuned with. It
            mixes outputs, so it is not for labels that are independent of each other either.
    """

    logits: Logits
    needs_covariance: bool = False


# All links by the name that ``link_approx`` gives them; every file of this folder adds its own.
LINKS: dict[str, Link] = {}


def register_link(name: str, logits: Logits, *, needs_covariance: bool = False) -> None:
    """Teach every model a new value of ``link_approx``; see :class:`Link` for the arguments.

    Raises:
        ValueError: ``"mc"`` stands for Monte Carlo and cannot be given away.
    """
    if name == "mc":
        raise ValueError("link_approx='mc' stands for Monte Carlo; choose another name")
    LINKS[name] = Link(logits, needs_covariance)
