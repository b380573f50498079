"""What a reader of a report should know before its numbers: what was warned of on the way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..model import RGPR
from .evaluate import Evaluation
from .passes import Answers

__all__ = ["heard", "overlaps", "without_numbers"]

# Tables of few values hold equal rows by chance, so a smaller share than this is not spoken of.
_SHARE = 0.01


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what is warned of inside; it is shown as it would be without."""
    said: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def listening(message: Warning | str, *where: Any, **more: Any) -> None:
            said.append(str(message))
            show(message, *where, **more)

        warnings.showwarning = listening
        yield said


def overlaps(model: RGPR, test: Answers) -> list[str]:
    """A warning for each of the training and the validation data that hold test inputs.

    The model keeps keys of a sample of both, so the numbers are lower bounds.
    """
    samples = (
        ("training", "fit", model._fit_keys, model._fit_count),
        ("validation", "calibrate", model._val_keys, model._references),
    )
    found = []
    for name, who, keys, data in samples:
        if keys is None or data is None:
            continue
        total = int(data) if data.dim() == 0 else len(data)
        count = test.known.get(name, 0)
        likely = count * max(1.0, total / len(keys))
        if count >= 2 and likely >= _SHARE * test.count:
            found.append(
                f"at least {count} of the {test.count} test inputs are {name} inputs that {who} "
                "saw, so the numbers here are better than those of new inputs will be. Test with "
                "inputs that were held out from both"
            )
    return found


def without_numbers(evaluation: Evaluation) -> list[str]:
    """A sentence for each set with inputs for which the network or the model gives a NaN."""
    return [
        f"for {count} of the {evaluation.counts[name]} inputs of '{name}' the network or the model "
        "gives NaN, as for inputs that hold one: they count as the strangest and have no answer"
        for name, count in evaluation.nans.items()
        if count
    ]
