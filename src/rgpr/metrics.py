"""How good and how honest probabilities are, and how well scores tell data from outliers.

The first take ``(B, C)`` probabilities. :func:`adaptive_ece`, :func:`reliability`, :func:`aurc` and
:func:`risk_coverage` take confidences and whether each answer was right, both ``(N,)``.
:func:`fpr95`, :func:`fpr95_openood`, :func:`auroc` and :func:`auprc` take a score for each input,
higher for inputs that are more like the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "accuracy",
    "adaptive_ece",
    "auprc",
    "aurc",
    "auroc",
    "brier",
    "confidence",
    "ece",
    "fpr95",
    "fpr95_openood",
    "nll",
    "reliability",
    "risk_coverage",
]


def confidence(probabilities: Tensor) -> Tensor:
    """The largest probability of each row, ``(B,)``."""
    return _checked(probabilities).amax(1)


def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    """Share of rows whose most probable class is the target.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    0.5
    """
    probabilities = _checked(probabilities, targets)
    return (probabilities.argmax(1) == targets).double().mean().item()


def nll(probabilities: Tensor, targets: Tensor) -> float:
    """Mean negative log-probability of the targets."""
    probabilities = _checked(probabilities, targets)
    return -probabilities.double().gather(1, targets[:, None]).log().mean().item()


def brier(probabilities: Tensor, targets: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot targets."""
    probabilities = _checked(probabilities, targets).double()
    one_hot = torch.nn.functional.one_hot(targets, probabilities.shape[1])
    return (probabilities - one_hot).square().sum(1).mean().item()


def ece(probabilities: Tensor, targets: Tensor, *, bins: int = 15) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy, over equal bins.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 3)
    0.4
    """
    probabilities = _checked(probabilities, targets).double()
    top, prediction = probabilities.max(1)
    correct = (prediction == targets).double()
    index = (top * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=torch.float64, device=top.device)
    gap.index_add_(0, index, correct - top)
    return gap.abs().sum().item() / len(top)


def adaptive_ece(confidences: Tensor, right: Tensor, *, bins: int = 15) -> float:
    """The mean gap between confidence and accuracy over bins of equally many examples.

    Most confidences of a trained network are near one, where :func:`ece` has one bin for all.

    >>> sure, right = torch.tensor([0.5, 0.5, 0.75, 0.75]), torch.tensor([1, 0, 1, 1])
    >>> adaptive_ece(sure, right, bins=2)
    0.125
    """
    c, correct = _answers(confidences, right)
    order = c.argsort(stable=True)
    parts = zip(c[order].tensor_split(bins), correct[order].tensor_split(bins), strict=True)
    return sum(float((each - of).sum().abs()) for of, each in parts) / len(c)


def reliability(confidences: Tensor, right: Tensor, *, bins: int = 15) -> Tensor:
    """For each of so many equal bins: mean confidence, accuracy and count, ``(bins, 3)``.

    Bins that hold nothing have a count of zero and NaN for the other two.
    """
    c, correct = _answers(confidences, right)
    index = (c * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(bins, 3, dtype=torch.float64, device=c.device)
    sums.index_add_(0, index, torch.stack([c, correct, torch.ones_like(c)], 1))
    return torch.cat([sums[:, :2] / sums[:, 2:], sums[:, 2:]], 1)


def risk_coverage(confidences: Tensor, right: Tensor) -> Tensor:
    """The share of errors among the most confident ``1, 2, ..., N`` answers, ``(N,)``.

    Equal confidences cannot be told apart: each of them stands for the mean of its group.
    """
    c, correct = _answers(confidences, right)
    values, group, counts = torch.unique(-c, return_inverse=True, return_counts=True)
    wrong = torch.zeros_like(values).index_add_(0, group, 1 - correct) / counts
    total: Tensor = wrong.repeat_interleave(counts).cumsum(0)
    return total / torch.arange(1, len(c) + 1, device=c.device)


def aurc(confidences: Tensor, right: Tensor) -> float:
    """Area under :func:`risk_coverage`: the mean risk over all coverages, less is better.

    >>> aurc(torch.tensor([0.9, 0.8]), torch.tensor([1, 0]))
    0.25
    """
    return risk_coverage(confidences, right).mean().item()


def fpr95(in_scores: Tensor, out_scores: Tensor) -> float:
    """Share of outliers that pass where at least 95 % of the data do: less is better.

    Higher scores are more in-distribution. An input passes if its score is at least the threshold,
    which is the largest that lets 95 % of the data pass; outliers that tie with it pass too.

    Args:
        in_scores: The scores of the data, ``(N,)``.
        out_scores: The scores of the outliers, ``(M,)``.

    Raises:
        ValueError: Not vectors, empty, or with a NaN.

    >>> fpr95(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.75, 0.2]))
    0.5
    """
    inside, outside = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    # In whole numbers: 5 % of the data, rounded down, may be left below.
    threshold = inside.sort().values[len(inside) * 5 // 100]
    return (outside >= threshold).double().mean().item()


def fpr95_openood(in_scores: Tensor, out_scores: Tensor) -> float:
    """Share of the data that is refused where at least 95 % of the outliers are: less is better.

    OpenOOD and pytorch-ood mean this by FPR95; :func:`fpr95` is the paper's, with the parts of data
    and outliers exchanged.

    >>> fpr95_openood(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([0.75, 0.2]))
    0.5
    """
    return fpr95(-out_scores, -in_scores)


def auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """Probability that a data point scores above an outlier, ties counted half: more is better.

    Higher scores are more in-distribution.

    Args:
        in_scores: The scores of the data, ``(N,)``.
        out_scores: The scores of the outliers, ``(M,)``.

    Raises:
        ValueError: Not vectors, empty, or with a NaN.

    >>> auroc(torch.tensor([0.9, 0.5]), torch.tensor([0.5, 0.2]))
    0.875
    """
    inside, outside = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    ordered, inside = outside.sort().values, inside.to(outside.device)
    below = torch.searchsorted(ordered, inside)
    not_above = torch.searchsorted(ordered, inside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def auprc(in_scores: Tensor, out_scores: Tensor) -> float:
    """Area under precision against recall (average precision), the data being what is to be found.

    It depends on how many there are of each: scores that tell nothing give the share of the data.
    Higher scores are more in-distribution; more is better.

    Args:
        in_scores: The scores of the data, ``(N,)``.
        out_scores: The scores of the outliers, ``(M,)``.

    Raises:
        ValueError: Not vectors, empty, or with a NaN.

    >>> auprc(torch.tensor([0.9, 0.5]), torch.tensor([0.7]))
    0.8333333333333333
    """
    inside, outside = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    outside = outside.to(inside.device)
    # Every data point is a threshold: how many of each kind reach it.
    found, mistaken = (
        len(scores) - torch.searchsorted(scores.sort().values, inside)
        for scores in (inside, outside)
    )
    return (found / (found + mistaken).double()).mean().item()


def _answers(confidences: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if confidences.dim() != 1 or len(confidences) == 0 or right.shape != confidences.shape:
        raise ValueError(
            f"confidences have shape {tuple(confidences.shape)} and right has "
            f"{tuple(right.shape)}; expected (N,) for both, one for each answer"
        )
    if bool(confidences.isnan().any()):
        raise ValueError("a confidence is NaN, neither high nor low: leave such examples out")
    return confidences.detach().double(), right.to(confidences.device).double()


def _scores(name: str, scores: Tensor) -> Tensor:
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(f"{name} have shape {tuple(scores.shape)}; expected (N,), one an input")
    if bool(scores.isnan().any()):
        row = int(scores.isnan().nonzero()[0])
        raise ValueError(f"{name} hold a NaN at {row}, which is neither high nor low: leave it out")
    return scores.detach().double()


def _checked(probabilities: Tensor, targets: Tensor | None = None) -> Tensor:
    if probabilities.dim() != 2 or len(probabilities) == 0:
        raise ValueError(f"probabilities have shape {tuple(probabilities.shape)}; expected (B, C)")
    off = (probabilities.double().sum(1) - 1).abs()
    row = int(off.nan_to_num(torch.inf).argmax())
    if bool(off[row].isnan()):
        raise ValueError(f"row {row} holds a NaN; it is neither right nor wrong: leave it out")
    if off[row] > 1e-3 + 4 * torch.finfo(probabilities.dtype).eps:
        raise ValueError(
            f"row {row} sums to {probabilities[row].double().sum():.4g}, not 1; these look like "
            "logits: use softmax"
        )
    if targets is not None and targets.shape != probabilities.shape[:1]:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; expected ({len(probabilities)},), one "
            "class index for each row of probabilities"
        )
    return probabilities
