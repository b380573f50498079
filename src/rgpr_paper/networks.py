"""The trained image networks, shared by all experiments and never trained twice.

A network belongs to a set, a recipe (the word ``fast`` or ``paper``, which names a training plan
for each set) and a seed. Its training run is a checkpoint under ``OUT/checkpoints``, which version
control leaves alone; an interrupted training goes on from there. Ensembles of five share their
members: that of seed ``s`` has the networks of the seeds ``s`` to ``s + 4``, so three ensembles
take seven networks. They are no longer independent of each other, which narrows the spread between
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from .context import Context
from .data import ImageSet, read_split
from .training import RunOptions, TrainingPlan, lenet, resnet18, train

__all__ = ["MEMBERS", "SETTINGS", "Setting", "ensemble", "kept", "plan_of", "trained", "trained_on"]

MEMBERS = 5


@dataclass(frozen=True)
class Setting:
    """How the networks of a set are made.

    Attributes:
        build: Makes the network, untrained.
        plans: The training plan for each word that ``--recipe`` takes.
        classes: Number of classes.
        swag_lr: Constant learning rate with which SWAG goes on from the trained network.
    """

    build: Callable[[], nn.Module]
    plans: dict[str, TrainingPlan]
    classes: int = 10
    swag_lr: float = 0.01


# Mirrored digits are other digits: the images of MNIST and SVHN are shifted and never mirrored.
_PHOTOS = {"fast": TrainingPlan.fast(), "paper": TrainingPlan.paper_sgd()}
_DIGITS = TrainingPlan.fast(augment="none", batch_size=64, lr=0.02)
SETTINGS = {
    "mnist": Setting(
        lenet, {"fast": TrainingPlan.fast(augment="crop"), "paper": TrainingPlan.paper_adam()}
    ),
    "cifar10": Setting(resnet18, _PHOTOS),
    "svhn": Setting(
        resnet18, {word: replace(plan, augment="crop") for word, plan in _PHOTOS.items()}
    ),
    "cifar100": Setting(partial(resnet18, classes=100), _PHOTOS, classes=100),
    "digits": Setting(partial(lenet, size=16), {"fast": _DIGITS, "paper": _DIGITS}),
}


def trained(context: Context, name: str, seed: int, *, progress: bool = True) -> nn.Module:
    """The network of a set and a seed, on the context's device, in evaluation mode.

    Raises:
        MissingDataError: The set is not there.
        ValueError: The checkpoint is of another training run.
    """
    training, _ = read_split(context.data, name, context.device, context.download)
    return trained_on(context, training, SETTINGS[name], name, seed, progress=progress)


def trained_on(
    context: Context,
    training: ImageSet,
    setting: Setting,
    name: str,
    seed: int,
    *,
    progress: bool = True,
) -> nn.Module:
    """The network of a setting and a seed, trained by :func:`plan_of`.

    Args:
        context: Where to train, and where the checkpoint is kept.
        training: The training data.
        setting: How the network is built and trained.
        name: Name of the checkpoint, which other networks must not have.
        seed: Seed of the weights and of the training.
        progress: Show a progress bar where there is a terminal.

    Raises:
        ValueError: The checkpoint is of another training run.
    """
    plan = plan_of(context, setting)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = setting.build()
    options = RunOptions(
        seed=seed,
        device=context.device,
        checkpoint=kept(context, name, seed, "safetensors"),
        compile=training.x.shape[1] == 3,  # the large networks: a LeNet waits for its own launches
        progress=progress,
    )
    train(network, (training.x, training.y), plan, options)
    return network


def plan_of(context: Context, setting: Setting) -> TrainingPlan:
    """The plan of the context's recipe; the small version has a tenth of its epochs."""
    plan = setting.plans[context.recipe]
    return replace(plan, epochs=max(1, plan.epochs // 10)) if context.small else plan


def ensemble(context: Context, name: str, seed: int) -> list[nn.Module]:
    """The five networks of the seeds ``seed`` to ``seed + 4``."""
    return [trained(context, name, seed + member) for member in range(MEMBERS)]


def kept(context: Context, name: str, seed: int, ending: str) -> Path:
    """A file of a network in a folder that version control leaves alone, and which is made here."""
    folder = context.out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    kind = f"{context.recipe}-small" if context.small else context.recipe
    return folder / f"{name}-{kind}-seed{seed}.{ending}"
