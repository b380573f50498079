"""Two moons: the networks, outliers and maps that the experiments on them share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rgpr import noise
from rgpr._demo import Task, moons, show_map, train, wrap
from rgpr.model import RGPR

__all__ = ["show_maps", "two_moons", "uniform_around"]


def two_moons(seed: int, epochs: int) -> tuple[Task, dict[str, RGPR], DataLoader[Any]]:
    """A trained network without and with residual, by name, and half the test data."""
    task = moons(seed)
    torch.manual_seed(seed)
    models = wrap(train(task, epochs), task)
    x, y = task.test
    half = len(x) // 2
    return task, models, DataLoader(TensorDataset(x[:half], y[:half]), batch_size=256)


def uniform_around(x: Tensor, seed: int) -> list[Tensor]:
    """Uniform noise in a box three times as wide as the data."""
    low, high = x.amin(0), x.amax(0)
    margin = high - low
    generator = torch.Generator().manual_seed(seed)
    return [noise.uniform(x, low=low - margin, high=high + margin, generator=generator)]


def show_maps(
    figure: Any,
    axes: Any,
    maps: dict[str, Tensor],
    titles: dict[str, str],
    widths: dict[str, float],
) -> None:
    """Maps of confidence by name, a column each, and by width, a row each; with the data."""
    for column, (name, title) in enumerate(titles.items()):
        axes[0, column].set_title(title)
        for row, (zoom, width) in enumerate(widths.items()):
            image = maps[f"{name}, {zoom}"].float()
            shown = show_map(axes[row, column], image, width, maps["x"], maps["y"])
    for row, zoom in enumerate(widths):
        axes[row, 0].set_ylabel(zoom)
    figure.colorbar(shown, ax=axes, label="confidence", shrink=0.8)
