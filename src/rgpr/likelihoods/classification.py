"""One of several classes: the softmax of the outputs; one output ``f`` is the pair ``(0, f)``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import check_known, in_rows, misshapen
from .labels import LabelLikelihood

__all__ = ["Classification", "log_softmax", "softmax", "two_columns"]


def softmax(logits: Tensor) -> Tensor:
    """Probabilities ``(..., C)`` of logits; two columns for one output."""
    return torch.softmax(two_columns(logits), -1)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities ``(..., C)`` of logits; two columns for one output."""
    return torch.log_softmax(two_columns(logits), -1)


def two_columns(logits: Tensor) -> Tensor:
    """Logits ``(..., C)``; the pair ``(0, f)`` for one output ``f``."""
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
    return logits


class Classification(LabelLikelihood):
    """Targets are class indices ``(B,)``; probabilities have two columns for one output."""

    name = "classification"
    independent: ClassVar[bool] = False
    sets: ClassVar[bool] = True

    def choices(self, logits: Tensor) -> Tensor:
        return two_columns(logits)

    def confidence(self, probabilities: Tensor) -> Tensor:
        return probabilities.amax(1)

    def prediction(self, probabilities: Tensor) -> Tensor:
        return probabilities.argmax(1)

    def classes(self, outputs: int) -> int:
        return max(2, outputs)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()

    def target(self, target: Tensor, outputs: tuple[int, ...], number: int) -> Tensor:
        """Class indices ``(B,)``, from whole numbers of any dtype or one-hot rows."""
        classes = max(2, outputs[1])
        wanted = f"class indices (B,), or one-hot rows (B, {classes})"
        flat = target
        if target.shape != (outputs[0],):
            flat = in_rows(target, outputs, number, wanted)
            if target.dim() > 2 or flat.shape[1] not in (1, classes):
                raise misshapen(target, outputs, number, wanted)
            if flat.shape[1] == classes:
                return _one_hot(check_known(flat, number), number)
            flat = flat[:, 0]
        if flat.is_floating_point():
            check_known(flat, number)
            if not bool((flat == flat.round()).all()):
                raise _no_classes(flat, number)
        wrong = (flat < 0) | (flat >= classes)
        if bool(wrong.any()):
            raise _outside(flat, flat[wrong][0].item(), classes, number)
        return flat.long()


def _one_hot(rows: Tensor, number: int) -> Tensor:
    """Class indices ``(B,)`` of rows with a single one."""
    hot, sums = (rows == 1), rows.double().sum(1)
    if not bool((hot | (rows == 0)).all()):
        if bool((rows >= 0).all()) and bool(((sums - 1).abs() < 1e-4).all()):
            raise ValueError(
                f"batch {number} has soft labels (rows of shares that sum to 1), and classes are "
                "taken here; give y.argmax(1)"
            )
        raise _no_classes(rows, number)
    if not bool((sums == 1).all()):
        row = int((sums != 1).nonzero()[0])
        raise ValueError(
            f"batch {number} has targets of zeros and ones, and row {row} has {int(sums[row])} "
            "ones, so it is of no single class. If an input may have any number of labels, pass "
            "likelihood='multilabel'"
        )
    return hot.long().argmax(1)


def _no_classes(values: Tensor, number: int) -> ValueError:
    """The error for targets that are not whole numbers."""
    value = values[values != values.round()]
    shown = f"{value[0].item():.4g}" if len(value) else f"{values.max().item():.4g}"
    soft = ""
    if bool(((values >= 0) & (values <= 1)).all()):
        soft = ". Soft labels are not used: give (y > 0.5).long() for them"
    return ValueError(
        f"batch {number} has targets such as {shown}, which are no classes, and "
        "likelihood='classification' (the default) predicts probabilities of classes. If the "
        f"network predicts numbers, say likelihood='regression'{soft}"
    )


def _outside(values: Tensor, value: float, classes: int, number: int) -> ValueError:
    """The error for labels that are none of the classes."""
    if classes == 2 and bool((values.abs() == 1).all()):
        remedy = "If the two classes are -1 and 1, give (y > 0).long()"
    elif value in (-1, -100):
        remedy = f"If {value:g} marks examples without a label, remove these rows"
    elif values.is_floating_point() or classes == 2:
        remedy = (
            "Number the classes from 0; if these are numbers to predict, say "
            "likelihood='regression'"
        )
    else:
        remedy = "Number the classes from 0, in the order of the network's outputs"
    return ValueError(
        f"batch {number} has the label {value:g} (labels from {values.min().item():g} to "
        f"{values.max().item():g}), and the network's outputs are of {classes} classes, 0 to "
        f"{classes - 1}. {remedy}"
    )
