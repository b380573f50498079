r"""Promises that hold for any number of examples, from ranks among held-out data.

If a new input and ``n`` reference inputs are exchangeable, its score is equally likely to take any
rank among theirs. So

.. math:: p(x) = \frac{1 + \#\{i : S_i \ge S(x)\}}{n + 1}

satisfies :math:`P(p \le \alpha) \le \alpha` for every :math:`\alpha` and every ``n``, whatever the
network, and :math:`P(s(x, y) \le s_{(k)}) \ge c` for :math:`k = \lceil c\,(n + 1) \rceil`. Both
need that what is ranked does not depend on the references. Here everything that is ranked is fixed
by the fit, so every held-out example serves, and nothing has to be split off.

- **Flags**: :math:`p \le \alpha`; or, for a batch, the procedure of Benjamini and Hochberg at a
  false discovery rate, which is valid for these p-values (Bates et al., 2023).
- **Sets of classes** by :math:`s(x, y) = 2 \log p_{\max}(x) - \log p_y(x)`: a class belongs to the
  set if its probability is at least :math:`e^{-s_{(k)}}\, p_{\max}^2`. The usual scores do not fit
  here: :math:`1 - p_y` gives *empty* sets where all probabilities are 1/C, and the mass of more
  probable classes leaves some out there. This one is smallest, for every class, at the uniform
  distribution, so far away the set is every class. The most probable class is always in it.
- **Bounds of labels**: each of several labels has two alternatives, there or not, and the score of
  a row of labels is the largest over them of the score above. So all labels of an input lie within
  their bounds at once. Far away every label may be there and none is sure to be.
- **Intervals** by :math:`s(x, y) = |y - m(x)| / d(x)`, with :math:`d^2` the base's variance plus
  the residual's plus its unit. So they widen away from the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "MOST_REFERENCES",
    "ROUNDING",
    "check_level",
    "check_share",
    "class_scores",
    "false_discoveries",
    "inside",
    "p_values",
    "quantile",
    "references_for",
]

# Of more references than these an even sample is kept; of fewer, where there are so many outputs
# that the sample would take more than 1 GiB. Promises hold as before, because the choice looks at
# no score, only at bits as good as random. P-values differ from those of all references by less
# than 0.0043 with a probability of 95 % (Dvoretzky, Kiefer and Wolfowitz).
MOST_REFERENCES = 100_000
# What rounding may change a score by: a network gives other last digits in batches of other sizes.
# Scores so near to each other count as equal, which can only make p-values and sets larger.
ROUNDING = 1e-5


def p_values(scores: Tensor, references: Tensor) -> Tensor:
    """The share of references at least as strange, the input itself counted: ``(B,)``.

    References that are smaller by rounding alone count as equal.

    Args:
        scores: ``(B,)`` in float64; a NaN stays one.
        references: ``(n,)`` in ascending order.
    """
    n, least = len(references), scores - ROUNDING
    if torch.compiler.is_compiling():
        below = _count_below(least, references)
    else:
        below = torch.searchsorted(references, least)
    p = (1 + n - below).double() / (n + 1)
    return torch.where(scores.isnan(), torch.nan, p)


def _count_below(values: Tensor, references: Tensor) -> Tensor:
    """What ``torch.searchsorted`` gives, by plain operations, which every exporter knows.

    A NaN has nothing below, where ``searchsorted`` would give the number of references.

    The references are laid out in rows of a square. The last numbers of the rows tell how many rows
    are below a value as a whole, and the numbers of the next row tell the rest. A binary search
    compares less, but its graph has a step for each halving, and every step costs a launch.
    """
    n = len(references)
    side = math.isqrt(max(n, 1) - 1) + 1
    square = F.pad(references, (0, side * side - n), value=math.inf).view(side, side)
    values = values[:, None]
    rows = (square[:, -1] < values).sum(1)
    rest = (square[rows.clamp(max=side - 1)] < values).sum(1)
    return (rows * side + rest).clamp(max=n)


def check_share(name: str, value: float) -> None:
    """Refuse a level or a coverage that is no share.

    Raises:
        ValueError: The message names it.
    """
    if not 0 < value < 1:
        raise ValueError(f"{name} = {value} must lie between 0 and 1")


def check_level(name: str, level: float, references: Tensor) -> None:
    """Refuse a level of flags that is no share, or that no p-value can be as small as.

    Args:
        name: What the user calls it.
        level: Its value.
        references: ``(n,)``.

    Raises:
        ValueError: The message says what is the matter.
    """
    check_share(name, level)
    if len(references) < references_for(level):
        raise ValueError(
            f"{name} = {level:g} is below 1/{len(references) + 1}, the smallest p-value that "
            f"{len(references)} references allow; calibrate with at least "
            f"{references_for(level)} examples, or use a larger {name}"
        )


def references_for(alpha: float) -> int:
    """How many references it takes for a p-value as small as ``alpha``."""
    return math.ceil(1 / alpha - 1e-9) - 1


def false_discoveries(p: Tensor, rate: float) -> Tensor:
    """Which of a batch to flag, ``(B,)``: at most this share of the flagged, on average, wrongly.

    Args:
        p: P-values ``(B,)`` in float64; inputs whose p-value is a NaN do not count.
        rate: The false discovery rate.
    """
    ordered = p[~p.isnan()].sort().values
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64, device=p.device)
    # P-values are multiples of a share, as the line is, so many lie on it, but for rounding.
    passing = ordered[ordered <= rate * ranks / max(1, len(ordered)) + 1e-9]
    return p <= passing[-1] if len(passing) else torch.zeros_like(p, dtype=torch.bool)


def class_scores(log_probabilities: Tensor) -> Tensor:
    """``s(x, y)`` for every class on the last axis, from log-probabilities in float64."""
    return 2 * log_probabilities.amax(-1, keepdim=True) - log_probabilities


def inside(log_probabilities: Tensor, bound: Tensor) -> Tensor:
    """Which classes on the last axis belong to a set, as booleans of the same shape.

    Args:
        log_probabilities: In float64.
        bound: The largest score of a class in the set.
    """
    most_probable = log_probabilities == log_probabilities.amax(-1, keepdim=True)
    # Everything is in where there is no answer to rank by.
    return (class_scores(log_probabilities) <= bound) | most_probable | log_probabilities.isnan()


def quantile(scores: Tensor, coverage: float) -> Tensor:
    """The bound that a new score keeps with this probability: one number, infinite for few scores.

    It leaves room for rounding.

    Args:
        scores: The scores of the references, ``(n,)`` in ascending order.
        coverage: Between 0 and 1.
    """
    rank = math.ceil(coverage * (len(scores) + 1) - 1e-9)
    if rank > len(scores):
        return scores.new_tensor(torch.inf)
    return scores[rank - 1] + ROUNDING * (1 + scores[rank - 1].abs())
