"""A training run in one file: safetensors and JSON, written atomically at the end of an epoch.

It holds the network's state, the optimiser's, the states of the random generators and what
identifies the run. The learning rate is a function of the step and needs no state.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rgpr.saving.container import check_same_network, read, write

from .plan import TrainingPlan

__all__ = ["Generators", "identity", "load", "save"]

_KIND = "training checkpoint"


class Generators:
    """The generators that a run draws from: its own, the loader's, torch's global ones."""

    def __init__(self, device: torch.device, **own: torch.Generator | None) -> None:
        self.device = device
        self.own = {name: generator for name, generator in own.items() if generator is not None}

    def states(self) -> dict[str, Tensor]:
        states = {name: generator.get_state() for name, generator in self.own.items()}
        states["global"] = torch.get_rng_state()
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def restore(self, states: Mapping[str, Tensor]) -> None:
        for name, generator in self.own.items():
            # A run resumed on another device goes on with other random numbers.
            if name in states and states[name].shape == generator.get_state().shape:
                generator.set_state(states[name])
        torch.set_rng_state(states["global"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def identity(plan: TrainingPlan, seed: int, steps: int) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    settings = dataclasses.asdict(plan)
    settings["milestones"] = list(plan.milestones)  # as JSON gives it back
    return {**settings, "seed": seed, "steps per epoch": steps}


def save(
    path: str | os.PathLike[str],
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: Generators,
    run: Mapping[str, Any],
    history: Mapping[str, Any],
) -> None:
    """Write the state of a run, replacing the file in one step.

    Raises:
        TypeError: The network's state holds something that is not a tensor.
        FileNotFoundError: The folder does not exist.
    """
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    tensors |= {f"generator.{name}": state for name, state in generators.states().items()}
    scalars: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                scalars[f"{index}.{key}"] = value
    about = {"kind": _KIND, "run": dict(run), "history": dict(history), "optimizer": scalars}
    write(path, tensors, about)


def load(
    path: str | os.PathLike[str],
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: Generators,
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Take up the run in a file; nothing is changed if it is another run's.

    Returns:
        The history as it was saved.

    Raises:
        ValueError: The file is damaged, no checkpoint, or of another plan, seed, amount of data
            or network.
    """
    tensors, about, _ = read(path)
    if not isinstance(about, dict) or about.get("kind") != _KIND:
        raise ValueError(f"{path} holds no training run; give the checkpoint a name of its own")
    saved = about["run"]
    differing = [
        f"{name} was {saved.get(name)!r} and is {run.get(name)!r}"
        for name in {**saved, **run}
        if saved.get(name) != run.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} belongs to another training run: {'; '.join(differing)}. Train as before, or "
            "remove the file to start anew"
        )
    weights = _below("network.", tensors)
    check_same_network(weights, network, path)
    network.load_state_dict(weights)
    _load_optimizer(optimizer, _below("optimizer.", tensors), about["optimizer"])
    generators.restore(_below("generator.", tensors))
    history: dict[str, Any] = about["history"]
    return history


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **scalars}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            # Fused steps walk memory, so a moment must lie there as its parameter does.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[key] = torch.empty_like(parameter).copy_(value)
