"""Networks and models of a user, from files and from code that the user names.

A network is ``package.module:factory``, a function or a class that is called without arguments or a
network itself, or a ``.pt2`` file that ``torch.export.save`` wrote, which needs no code. Weights
are tensors alone: safetensors, or what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._network.checks import network_dtype_device
from ...model import RGPR, load
from .programs import open_program

__all__ = ["load_weights", "model", "named", "network", "placed"]


def named(spec: str, option: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the module is imported.

    The current folder is where modules are looked for first.

    Args:
        spec: The name.
        option: What it was given as, for errors.

    Raises:
        ValueError: It names nothing, or importing it fails.
    """
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{option} {spec}: expected package.module:function, with a colon")
    if module.endswith(".py"):
        dotted = ".".join(Path(module).with_suffix("").parts)
        raise ValueError(f"{option} {spec}: leave out .py, and write {dotted}:{name}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{option} {spec}: {error}. Modules are looked for in {here} and among what is "
            "installed: run this in the folder that holds the module, or install it"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{option} {spec}: importing {module} failed with {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"{option} {spec}: {module} has no '{name}'; it has "
                f"{', '.join(each for each in dir(found) if not each.startswith('_'))}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{option} {spec} is a {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function


def network(spec: str, weights: str | Path | None = None) -> nn.Module:
    """A network, with its weights.

    Args:
        spec: ``package.module:factory``, a network in place of the factory, or a ``.pt2`` file.
        weights: A ``.safetensors`` file, or a ``.pt`` or ``.pth`` file of tensors alone.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The name, or the weights, do not fit.
    """
    if spec.endswith(".pt2"):
        if weights is not None:
            raise ValueError(f"{spec} holds its weights: leave out --weights {weights}")
        return torch.export.unflatten(open_program(Path(spec)))
    found = _made(named(spec, "--model"), spec)
    if not isinstance(found, nn.Module):
        raise ValueError(
            f"--model {spec} returned a {type(found).__name__}; expected a torch.nn.Module"
        )
    if weights is not None:
        load_weights(found, Path(weights))
    return found


def _made(factory: Callable[..., Any], spec: str) -> Any:
    """What a factory returns; a network stands for itself."""
    if isinstance(factory, nn.Module):
        return factory
    needed = _needed(factory)
    if needed:
        name = spec.rpartition(":")[2].rpartition(".")[2]
        raise ValueError(
            f"--model {spec} needs the arguments {', '.join(needed)}, and is called without any. "
            f"Write a function that gives them, such as def net(): return {name}(...), and name "
            "that"
        )
    try:
        return factory()
    except Exception as error:  # code of the user's own
        raise ValueError(
            f"--model {spec}: calling it without arguments failed with {type(error).__name__}: "
            f"{error}"
        ) from error


def _needed(factory: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a function cannot do without, as far as it says."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    some = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name for each in parameters if each.default is each.empty and each.kind not in some
    ]


def load_weights(network: nn.Module, path: Path) -> None:
    """Load weights that fit one to one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, holds more than tensors, or belongs to another network.
    """
    own = network.state_dict()
    state = _without_prefix(_weights(path), own, path)
    problems = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in (
            ("the file lacks", [name for name in own if name not in state]),
            ("the network has no", [name for name in state if name not in own]),
            (
                "of other shapes are",
                [
                    f"{name} ({tuple(state[name].shape)}, in the network {tuple(tensor.shape)})"
                    for name, tensor in own.items()
                    if isinstance(tensor, Tensor)
                    and name in state
                    and state[name].shape != tensor.shape
                ],
            ),
        )
        if names
    ]
    if problems:
        raise ValueError(f"--weights {path} does not fit the network: {'; '.join(problems)}")
    network.load_state_dict(dict(state))


def _without_prefix(
    state: Mapping[str, Tensor], own: Mapping[str, Any], path: Path
) -> Mapping[str, Tensor]:
    """Weights under the network's own names, where a wrapper put its name before each of them."""
    for prefix, wrapper in (("module.", "DataParallel"), ("_orig_mod.", "torch.compile")):
        names = {name: name.removeprefix(prefix) for name in state}
        if set(names.values()) == set(own) and set(state) != set(own):
            warnings.warn(
                f"the names in {path} begin with '{prefix}', as {wrapper} writes them; they are "
                "read without it",
                stacklevel=4,
            )
            return {names[name]: tensor for name, tensor in state.items()}
    return state


def _weights(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error})") from error
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(f"--weights {path}: expected a .safetensors, .pt or .pth file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} holds more than tensors, or is damaged, and is not opened, since that could "
            "run code. Save the weights alone: torch.save(network.state_dict(), path)"
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(
            f"{path} holds a {type(state).__name__}, not a state_dict of tensors; save "
            "network.state_dict(), alone or as {'state_dict': ...}"
        )
    return state


def placed(network: nn.Module, device: str) -> nn.Module:
    """The network on a device.

    Raises:
        ValueError: There is no such device here.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    return network.to(device)


def model(path: str | Path, spec: str, device: str = "cpu") -> RGPR:
    """The model in a file that ``rgpr fit`` or :meth:`rgpr.RGPR.save` wrote.

    Args:
        path: The file, which holds the network's weights too.
        spec: The network without its weights; see :func:`network`.
        device: Where it is to run.
    """
    return load(path, placed(network(spec), device))


def dtype_of(network: nn.Module) -> torch.dtype:
    """The dtype of the network's inputs, if they are real numbers."""
    return network_dtype_device(network)[0] or torch.get_default_dtype()
