"""The one table of bounds: operation -> :class:`~rgpr.guarantee.operations.Bound`.

The entries are those of ``activations`` and ``layer_bounds``, and what users register. The keys are
module classes, functions, and the names of tensor methods. Torch has several names for
one activation: ``nn.LeakyReLU``, ``F.leaky_relu``, ``F.leaky_relu_``. They are the same name up to
capitals and underscores, so an entry for one of them is an entry for all of them.

:func:`register_bound` adds an entry from outside:

>>> import torch, rgpr.guarantee
>>> from torch import nn
>>> class Wave(nn.Module):
...     def forward(self, x):
...         return x + torch.sin(x)
>>> rgpr.guarantee.register_bound(Wave, 2.0)  # the slope is 1 + cos(x)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .activations import ACTIVATIONS
from .layer_bounds import LAYERS
from .operations import Bound, Factor, by_factor

__all__ = ["bound_of_call", "bound_of_module", "register_bound", "registered_functions"]

_table: dict[Any, Bound] = dict(LAYERS)


def register_bound(
    operation: type[nn.Module] | Callable[..., Tensor],
    bound: Factor,
    *,
    piecewise_affine: bool = False,
) -> None:
    """Tell ``certify`` and ``check`` the Lipschitz constant of an operation.

    The constant must be true for every input, since the certificate is only as rigorous as its
    parts. A later call for the same operation replaces the earlier one.

    Args:
        operation: A module class or a function. All of torch's names for one operation count as
            the same: with ``nn.Softshrink`` comes ``F.softshrink``. A subclass shares the bound of
            a module class if it keeps its ``forward``. A function of your own is recognised where
            a network's ``forward`` calls it by a name in its own file, as in ``wave(x)``.
        bound: ``L`` such that ``|f(a) - f(b)| <= L |a - b|`` in the Euclidean norm for all ``a``
            and ``b``. If ``L`` depends on options, pass a function that takes the
            :class:`~rgpr.guarantee.operations.Call` and returns ``L``, or ``None`` to refuse.
        piecewise_affine: Whether the operation is piecewise affine, as the paper assumes; only
            :func:`rgpr.check` reports it.

    Raises:
        TypeError: The operation is neither a module class nor a function.
        ValueError: The bound is negative, infinite or not a number.
    """
    is_module = isinstance(operation, type) and issubclass(operation, nn.Module)
    is_function = not isinstance(operation, type) and hasattr(operation, "__name__")
    if not is_module and not is_function:
        raise TypeError(
            f"operation = {operation!r} is neither a subclass of nn.Module nor a function with a "
            "name; for a module, pass its class"
        )
    if not callable(bound) and not 0 <= bound < float("inf"):
        raise ValueError(f"bound = {bound} is not a Lipschitz constant: a number from 0 on")
    _add(operation, by_factor(bound, piecewise_affine=piecewise_affine))


def bound_of_module(module: nn.Module) -> Bound | None:
    """Returns the bound of a module, or of the class whose ``forward`` it inherits."""
    forward = getattr(module.forward, "__func__", None)
    classes: list[Any] = [kind for kind in type(module).__mro__ if kind in _table]
    return next((_table[kind] for kind in classes if kind.forward is forward), None)


def bound_of_call(target: Callable[..., Any] | str) -> Bound | None:
    """Returns the bound of a function, or of the tensor method with this name."""
    return _table.get(target)


def registered_functions() -> tuple[Callable[..., Any], ...]:
    """Returns the functions in the table that are not torch's own.

    Tracing would step into the body of such a function, so it must be told to leave them whole.
    """
    functions = (operation for operation in _table if isinstance(operation, FunctionType))
    return tuple(f for f in functions if f.__module__.partition(".")[0] != "torch")


def _add(operation: Any, bound: Bound) -> None:
    same_name = _torch_names().get(_plain(operation.__name__), [])
    for spelling in same_name if operation in same_name else [operation]:
        _table[spelling] = bound


@cache
def _torch_names() -> dict[str, list[Any]]:
    """Returns torch's modules, functions and methods, by their names without capitals and ``_``."""
    found: dict[str, list[Any]] = defaultdict(list)
    for place in (nn, F, torch):
        for name in dir(place):
            operation = getattr(place, name)
            if not name.startswith("_") and callable(operation):
                found[_plain(name)].append(operation)
    for name in dir(Tensor):
        if not name.startswith("_"):
            found[_plain(name)].append(name)
    return dict(found)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


for _kind, _bound in ACTIVATIONS.items():
    _add(_kind, _bound)
