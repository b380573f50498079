"""Examples of a report: the strangest and the most ordinary inputs, and how they are shown."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._network.checks import network_dtype_device
from .._network.loaders import inputs_and_targets, on_device
from .._network.sources import Batches
from ..model import RGPR

__all__ = ["Example", "Fact", "Looks", "examples", "facts", "picture"]

_EXAMPLES = 6
# Columns of a table that are shown of a row, and outputs of a regression.
_FACTS, _OUTPUTS = 6, 3
# Images have sides of at least so many pixels; of a table of numbers both sides must, and one may
# not be more than so many times as long as the other, which sequences are.
_SIDE, _TABLE_SIDE, _RATIO = 4, 8, 4


@dataclass(frozen=True)
class Looks:
    """How inputs and answers are shown.

    Attributes:
        classes: Names of the classes or labels, in the order of the outputs.
        image: Height and width of flat inputs that are images, or channels before them.
    """

    classes: Sequence[str] | None = None
    image: tuple[int, ...] | None = None

    def name(self, number: int) -> str:
        """The name of a class."""
        known = self.classes is not None and 0 <= number < len(self.classes)
        return str(self.classes[number]) if known else f"class {number}"  # type: ignore[index]

    def labels(self, numbers: Sequence[int]) -> str:
        """The names of several labels."""
        if self.classes is None:
            return f"labels {list(numbers)}"
        return ", ".join(self.name(number) for number in numbers) or "no label"


@dataclass(frozen=True)
class Fact:
    """One entry of an input.

    Attributes:
        name: Of its column, or its place.
        value: As text.
        usual: The mean of the training data, as text.
    """

    name: str
    value: str
    usual: str


@dataclass(frozen=True)
class Example:
    """One input, and why it is where it is.

    Attributes:
        x: The input, on the CPU.
        name: Its file, or its place in the data.
        score: How strange it is.
        p_value: Of a calibrated model.
        confidence: Of the prediction.
        label: The prediction.
        spread: How far off a regression may be.
        layer: The layer that finds it strangest.
        times: How many times as far from the training data that layer finds it as is usual.
        truth: The target, if there is one.
    """

    x: Tensor
    name: str
    score: float
    p_value: float | None
    confidence: float | None
    label: str
    spread: str
    layer: str
    times: str
    truth: str = ""


@torch.no_grad()
def examples(model: RGPR, data: Iterable[Any], looks: Looks) -> dict[str, list[Example]]:
    """The strangest and the most ordinary inputs of a set."""
    network = model.posterior.network
    device = network_dtype_device(network)[1]
    kept: list[Example] = []
    number, named = 0, _Named(data)
    for x, y in inputs_and_targets(named, network, progress=False, description=""):
        if not isinstance(x, Tensor):
            return {}
        explained = model.explain(on_device(x, device))
        score = explained.score.cpu()
        order = score.argsort()
        count = min(_EXAMPLES, len(order))
        rows = sorted({*order[:count].tolist(), *order[-count:].tolist()})
        some = on_device(x[rows], device)
        said = _said(model, some, looks)
        p = None if model._references is None else model.p_value(some)
        for place, row in enumerate(rows):
            strangeness = explained.strangeness[row]
            layer = int(strangeness.argmax())
            label, confidence, spread = said[place]
            kept.append(
                Example(
                    x[row].detach().cpu(),
                    named.names[row] if named.names else f"row {number + row}, from 0",
                    float(score[row]),
                    None if p is None else float(p[place]),
                    confidence,
                    label,
                    spread,
                    explained.layers[layer],
                    _times(float(strangeness[layer])),
                    "" if y is None else _true(y[row], model.likelihood, looks),
                )
            )
        number += len(x)
        kept.sort(key=lambda example: example.score)
        if len(kept) > 2 * _EXAMPLES:
            kept = [*kept[:_EXAMPLES], *kept[-_EXAMPLES:]]
    half = max(1, len(kept) // 2)
    return {"strangest": kept[::-1][:half], "most ordinary": kept[:half]}


class _Named:
    """Batches of data, with the names of the rows of the last one that was read."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self.names: Sequence[str] | None = None

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self._data, Batches):
            yield from self._data
            return
        for batch, names in self._data.named():
            self.names = names
            yield batch


# -- words -----------------------------------------------------------------------------------------


def _said(model: RGPR, x: Tensor, looks: Looks) -> list[tuple[str, float | None, str]]:
    """Of each input the prediction, its confidence, and how far off a regression may be."""
    answered: Any = model(x)
    if model.likelihood == "regression":
        mean, covariance = answered
        spreads = _spreads(model, x, covariance)
        return [(_outputs(row), None, spread) for row, spread in zip(mean, spreads, strict=True)]
    if model.likelihood == "multilabel":
        return [
            (
                looks.labels((p > 0.5).nonzero().flatten().tolist()),
                float(torch.maximum(p, 1 - p).max()),
                "",
            )
            for p in answered
        ]
    return [(looks.name(int(p.argmax())), float(p.max()), "") for p in answered]


def _spreads(model: RGPR, x: Tensor, covariance: Tensor) -> list[str]:
    """The interval with the noise of the observations, where a calibration knows it."""
    if model._label_scores is None:
        deviations = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        return [f"± {_outputs(row)} without the noise of observations" for row in deviations]
    found = []
    for low, high in zip(*model.interval(x, 0.9), strict=True):
        if not bool((low.isfinite() & high.isfinite()).all()):
            found.append("90 % interval: any number")
            continue
        ends = [
            f"{_number(a)} to {_number(b)}"
            for a, b in zip(low.tolist()[:_OUTPUTS], high.tolist()[:_OUTPUTS], strict=True)
        ]
        found.append(f"90 % interval: {'; '.join(ends)}{'; ...' if len(low) > _OUTPUTS else ''}")
    return found


def _outputs(row: Tensor) -> str:
    row = row.flatten()
    shown = ", ".join(_number(value) for value in row[:_OUTPUTS].tolist())
    return shown + (", ..." if len(row) > _OUTPUTS else "")


def _true(y: Tensor, likelihood: str, looks: Looks) -> str:
    if likelihood == "regression":
        return _outputs(y.double())
    if likelihood == "multilabel":
        return looks.labels((y > 0).nonzero().flatten().tolist())
    return looks.name(int(y) if y.dim() == 0 or len(y) == 1 else int(y.argmax()))


def _times(strangeness: float) -> str:
    """How many times as far as usual; strangeness is the cube of a distance."""
    times = strangeness ** (1 / 3)
    if not math.isfinite(times):
        return "infinitely"
    return f"{times:.2g}" if times < 99.5 else f"{times:,.0f}" if times < 1e6 else f"{times:.0e}"


def _number(value: float) -> str:
    """A number with a true minus, which is not torn off at the end of a line."""
    form = ".0f" if 1000 <= abs(value) < 1e6 else ".3g"
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


# -- inputs ----------------------------------------------------------------------------------------


def facts(model: RGPR, x: Tensor, columns: Sequence[str] | None) -> list[Fact]:
    """The entries of an input that are furthest from the training data, in standard deviations."""
    flat = x.flatten()
    extension = model._extension()
    usual = None
    order = torch.arange(len(flat))
    if extension.source is None and x.is_floating_point():
        coordinates: Any = extension.residual.at(0)
        z = coordinates(x[None].to(coordinates.mean.device)).flatten().abs().cpu()
        order = z.nan_to_num(torch.inf).argsort(descending=True, stable=True)
        usual = coordinates.mean.flatten().cpu()
    found = []
    for place in order[:_FACTS].tolist():
        if columns is not None and len(columns) == len(flat):
            name = columns[place]
        elif x.dim() == 1:
            name = f"column {place}"
        else:
            where = torch.unravel_index(torch.tensor(place), x.shape)
            name = f"[{', '.join(str(int(i)) for i in where)}]"
        mean = "" if usual is None else _number(float(usual[place]))
        found.append(Fact(name, _number(float(flat[place])), mean))
    return found


def picture(x: Tensor, like: Tensor, looks: Looks) -> str:
    """A PNG as a data URI; empty for what is no image.

    Args:
        x: One input.
        like: A batch of inputs, whose least and largest values are black and white.
        looks: What a flat input may be the image of.
    """
    if x.dim() == 1 and looks.image is not None and math.prod(looks.image) == x.numel():
        x = x.reshape(looks.image)
    x = _image(x)
    if x.dim() != 3:
        return ""
    from PIL import Image

    low, high = float(like.amin()), float(like.amax())
    levels = ((x.float() - low) / max(high - low, 1e-12)).nan_to_num(0.0).clamp(0, 1)
    array = (255 * levels).round().byte().movedim(0, 2).squeeze(2).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _image(x: Tensor) -> Tensor:
    """An image as ``(C, H, W)``; what is none stays without three axes."""
    if x.dim() == 2 and min(x.shape) >= _TABLE_SIDE and max(x.shape) <= _RATIO * min(x.shape):
        return x[None]
    if x.dim() == 3 and x.shape[0] not in (1, 3) and x.shape[2] in (1, 3):
        x = x.movedim(2, 0)
    good = x.dim() == 3 and x.shape[0] in (1, 3) and min(x.shape[1:]) >= _SIDE
    return x if good else x.flatten()
