"""Small real data in the shapes that networks want; nothing is downloaded.

Everything comes from scikit-learn: its digits (8 x 8 pixels, ten classes) as images of any size,
as sequences of rows, as a signal, as a volume and as tokens, and its tables wine and breast
cancer. Every entry of an input is standardised by the mean and the standard deviation of all
training entries (of each column of a table), so inputs scaled by a factor are scaled away from the
data's centre.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .batches import Batch, taken

__all__ = ["Samples", "images", "rows", "signals", "table", "tokens", "volumes"]

_TRAIN, _TEST = 192, 60


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, already split.

    Attributes:
        about: What an input is, for the table.
        classes: Number of classes.
        train: Inputs and labels that the network is trained and the model fitted on. The inputs are
            a tensor, or a dict of tensors that the network takes by keyword.
        test: Held-out inputs and labels.
        tokens: Whether the inputs are indices, which cannot be scaled.
    """

    about: str
    classes: int
    train: tuple[Batch, Tensor]
    test: tuple[Batch, Tensor]
    tokens: bool = False


def images(size: int, channels: int = 3, keyword: str = "") -> Callable[[], Samples]:
    """Digits upsampled to ``size`` x ``size`` pixels, the same in every channel.

    Args:
        size: Height and width.
        channels: Number of channels.
        keyword: If it is given, batches are dicts with the images under this name.
    """

    def shape(x: Tensor) -> Tensor:
        small = x.reshape(-1, 1, 8, 8)
        large = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
        return large.expand(-1, channels, -1, -1).contiguous()

    about = f"digits, {channels} x {size} x {size}{f', as {keyword}' if keyword else ''}"
    return partial(_digits, about, shape, keyword)


def rows(time: int = 8) -> Callable[[], Samples]:
    """Digits as sequences of their rows from top to bottom: ``time`` steps of equal size."""
    return partial(
        _digits, f"rows of digits, {time} x {64 // time}", lambda x: x.reshape(-1, time, 64 // time)
    )


def signals(length: int, channels: int | None = None) -> Callable[[], Samples]:
    """The 64 pixels of a digit one after the other, as a signal of this length."""
    about = f"digits as signals, {f'{channels} x ' if channels else ''}{length}"

    def shape(x: Tensor) -> Tensor:
        long = F.interpolate(x.reshape(-1, 1, 64), size=length, mode="linear", align_corners=False)
        return long[:, 0] if channels is None else long.expand(-1, channels, -1).contiguous()

    return partial(_digits, about, shape)


def volumes(depth: int, size: int) -> Callable[[], Samples]:
    """Digits that fade in over ``depth`` frames."""

    def shape(x: Tensor) -> Tensor:
        flat = F.interpolate(x.reshape(-1, 1, 8, 8), size=(size, size), mode="bilinear")
        fade = torch.linspace(0.2, 1.0, depth).reshape(1, 1, depth, 1, 1)
        return flat[:, :, None] * fade

    return partial(_digits, f"digits fading in, 1 x {depth} x {size} x {size}", shape)


def tokens(length: int = 16) -> Callable[[], Samples]:
    """Digits as sentences: each token is one of 17 shades of grey, and blank ends are padding.

    Token 0 is padding, which the attention mask hides.
    """

    def make() -> Samples:
        x, y = (part[: _TRAIN + _TEST] for part in _loaded("digits"))
        shades = F.adaptive_avg_pool1d(x.reshape(-1, 1, 64), length)[:, 0].round().long()
        # One token at least, and everything up to the last shade that is not blank.
        ends = (shades > 0).flip(1).cumsum(1).flip(1) > 0
        ends[:, 0] = True
        words = {"input_ids": (shades + 1) * ends, "attention_mask": ends.long()}
        whole = _split(f"digits as {length} tokens", words, y)
        return replace(whole, tokens=True)

    return make


def table(name: str) -> Callable[[], Samples]:
    """A table of scikit-learn, ``"wine"``, ``"breast_cancer"`` or ``"digits"``, by columns."""

    def make() -> Samples:
        x, y = _loaded(name)
        # Two thirds train; the order is random already.
        cut = min(_TRAIN, 2 * len(x) // 3)
        spread, centre = x[:cut].std(0), x[:cut].mean(0)
        scaled = (x - centre) / torch.where(spread > 0, spread, 1.0)
        about = f"{name.replace('_', ' ')}, {x.shape[1]} columns"
        return _split(about, scaled, y)

    return make


def _digits(about: str, shape: Callable[[Tensor], Tensor], keyword: str = "") -> Samples:
    x, y = _loaded("digits")
    shaped = shape(x[: _TRAIN + _TEST])
    training = shaped[:_TRAIN]
    scaled = (shaped - training.mean()) / training.std()
    return _split(about, {keyword: scaled} if keyword else scaled, y[: _TRAIN + _TEST])


def _split(about: str, x: Batch, y: Tensor) -> Samples:
    cut = min(_TRAIN, 2 * len(y) // 3)
    train, test = ((taken(x, part), y[part]) for part in (slice(cut), slice(cut, cut + _TEST)))
    return Samples(about, int(y.max()) + 1, train, test)


@cache
def _loaded(name: str) -> tuple[Tensor, Tensor]:
    """The whole set in a random order that is always the same."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    found: tuple[Any, Any] = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return found[0][order], found[1][order]
