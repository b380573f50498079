"""The trained image networks, shared by all experiments and never trained twice.

A network belongs to a set, a recipe (``fast`` or ``paper``) and a seed. Its training run is a
checkpoint under ``OUT/checkpoints``, which version control leaves alone; an interrupted training
goes on from there. Ensembles of five share their members: that of seed ``s`` has the networks of
the seeds ``s`` to ``s + 4``, so three ensembles take seven networks. They are no longer
independent of each other, which narrows the spread between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from .data import read_split
from .experiment import Context
from .training import Recipe, lenet, resnet18, train

__all__ = ["MEMBERS", "SETTINGS", "ensemble", "trained"]

MEMBERS = 5


@dataclass(frozen=True)
class Setting:
    """How the networks of a set are made.

    Attributes:
        build: Makes the network.
        recipes: For each word of ``--recipe``.
        classes: How many there are.
        swag_lr: Constant learning rate with which SWAG goes on from the trained network.
    """

    build: Callable[[], nn.Module]
    recipes: dict[str, Recipe]
    classes: int = 10
    swag_lr: float = 0.01


# Mirrored digits are other digits: MNIST and SVHN are shifted alone.
_DIGITS = Recipe.fast(augment="none", batch_size=64, lr=0.02)
SETTINGS = {
    "mnist": Setting(lenet, {"fast": Recipe.fast(augment="crop"), "paper": Recipe.paper_adam()}),
    "cifar10": Setting(resnet18, {"fast": Recipe.fast(), "paper": Recipe.paper_sgd()}),
    "svhn": Setting(
        resnet18,
        {"fast": Recipe.fast(augment="crop"), "paper": Recipe.paper_sgd(augment="crop")},
    ),
    "cifar100": Setting(
        partial(resnet18, classes=100),
        {"fast": Recipe.fast(), "paper": Recipe.paper_sgd()},
        classes=100,
    ),
    "digits": Setting(partial(lenet, size=16), {"fast": _DIGITS, "paper": _DIGITS}),
}


def recipe_of(context: Context, name: str) -> Recipe:
    """The recipe for a set; a tenth of its epochs if small."""
    recipe = SETTINGS[name].recipes[context.recipe]
    return replace(recipe, epochs=max(1, recipe.epochs // 10)) if context.small else recipe


def trained(context: Context, name: str, seed: int, *, progress: bool = True) -> nn.Module:
    """The network of a set and a seed, on the context's device, in evaluation mode.

    Raises:
        MissingDataError: The set is not there.
        ValueError: The checkpoint is of another training run.
    """
    training, _ = read_split(context.data, name, context.device, context.download)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SETTINGS[name].build()
    train(
        network,
        (training.x, training.y),
        recipe_of(context, name),
        device=context.device,
        seed=seed,
        checkpoint=_checkpoint(context, name, seed),
        progress=progress,
    )
    return network


def ensemble(context: Context, name: str, seed: int) -> list[nn.Module]:
    """The five networks of the seeds ``seed`` to ``seed + 4``."""
    return [trained(context, name, seed + member) for member in range(MEMBERS)]


def _checkpoint(context: Context, name: str, seed: int) -> Path:
    folder = context.out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    kind = f"{context.recipe}-small" if context.small else context.recipe
    return folder / f"{name}-{kind}-seed{seed}.safetensors"
