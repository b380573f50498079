r"""What an attacker wants: a high confidence, a low score, or both at once.

An aim gives two numbers for each row. The first is what the next step climbs; the second is what
the attack is worth if it ends here, by which the best point on the way is kept. Confidence is
climbed as log-odds

.. math:: \log p_t - \log \sum_{c \ne t} p_c,

which grow where the probability itself has long been one in floating point. "Both" climbs the
log-odds while the row is not flagged, and lowers the score while it is; a flagged row is worth
nothing. So no weight between the two has to be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rgpr.answers import conformal
from rgpr.answers.probabilities import log_probabilities
from rgpr.answers.score import score
from rgpr.model import RGPR

__all__ = ["ALPHA", "Aim", "Answers", "answers", "both", "confident", "log_odds", "unnoticed"]

# The level of flags, which is that of `RGPR.flag`.
ALPHA = 0.05


@dataclass(frozen=True)
class Answers:
    """What a model says about ``B`` rows, from one pass.

    Attributes:
        log_p: Log-probabilities ``(B, C)`` in float64.
        score: ``(B,)`` in float64.
        flagged: Whether the score is too high at the level of 5 %, ``(B,)``; no row is flagged by
            a model that was not calibrated.
    """

    log_p: Tensor
    score: Tensor
    flagged: Tensor

    @property
    def confidence(self) -> Tensor:
        """The largest probability, ``(B,)``."""
        return self.log_p.amax(1).exp()


Aim = Callable[[Answers], tuple[Tensor, Tensor]]


def answers(model: RGPR, x: Tensor) -> Answers:
    """What the model says, with a graph for gradients if ``x`` wants one."""
    extension = model._extension()
    reading = extension.read(x)
    strange = score(extension, reading)
    flagged = torch.zeros_like(strange, dtype=torch.bool)
    if model._references is not None:
        flagged = conformal.p_values(strange.detach(), model._references) <= ALPHA
    return Answers(log_probabilities(extension, reading), strange, flagged)


def log_odds(log_p: Tensor, target: Tensor) -> Tensor:
    """The log-odds of one class against all others together, ``(B,)``.

    Args:
        log_p: Log-probabilities ``(B, C)``.
        target: The class of each row, ``(B,)``.
    """
    # The others by their sum, not as one minus the target: that would round to zero.
    rest = log_p.scatter(1, target[:, None], -torch.inf).logsumexp(1)
    return log_p.gather(1, target[:, None])[:, 0] - rest


def confident(target: Tensor) -> Aim:
    """A high confidence in the target class, whatever the score."""

    def aim(found: Answers) -> tuple[Tensor, Tensor]:
        odds = log_odds(found.log_p, target)
        return odds, odds

    return aim


def unnoticed(found: Answers) -> tuple[Tensor, Tensor]:
    """A low score, whatever the class."""
    return -found.score, -found.score


def both(target: Tensor) -> Aim:
    """A high confidence in the target class among inputs that are not flagged."""

    def aim(found: Answers) -> tuple[Tensor, Tensor]:
        odds = log_odds(found.log_p, target)
        climbed = torch.where(found.flagged, -found.score, odds)
        return climbed, torch.where(found.flagged, -torch.inf, odds)

    return aim
