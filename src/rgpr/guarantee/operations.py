r"""What a bound of one operation is made from.

A network is a graph of operations. If every tensor that goes into an operation changes by at most
:math:`k_i \|\Delta z\|` when the network's input changes by :math:`\Delta z`, then what comes out
changes by at most :math:`k \|\Delta z\|`. A :class:`Bound` computes ``k`` from the ``k_i``, and for
an operation of one tensor with Lipschitz constant ``L`` it is :math:`k = L k_1`. A :class:`Call`
holds the ``k_i`` and the operation's options. It hides whether the network called a module, a
function or a tensor's method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Bound", "Call", "Factor", "NotBoundedError", "by_factor"]


class NotBoundedError(TypeError):
    """Raised where a part of the network has no known bound; the message names that part."""


@dataclass(frozen=True)
class Call:
    """One call of an operation, on a batch of one example.

    Attributes:
        constants: ``k_i`` of each tensor that goes in, in the order of the arguments.
        shapes: Shape of each of those tensors.
        made: Shape of the tensor that comes out.
        module: The module that was called, or ``None`` for a function and a method.
        function: The function that was called, or ``None`` for a module and a method.
        args: Positional arguments of a function or a method; a method's tensor is the first.
        kwargs: Its keyword arguments.
        scale: Scale of each entry of the network's input, if what goes in is that input itself,
            entry by entry and in its order; otherwise ``None``.
        quick: Whether a number that the bound is not below will do, because it is cheaper.
    """

    constants: tuple[float, ...]
    shapes: tuple[torch.Size, ...]
    made: torch.Size
    module: nn.Module | None = None
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scale: Tensor | None = None
    quick: bool = False

    def read(self, name: str, position: int | None = None, default: Any = None) -> Any:
        """Returns an option from the module's attribute, or from the function's argument.

        Args:
            name: Name of the attribute and of the keyword argument.
            position: Position of the argument in the function's call; the tensor has position 0.
            default: The value if the option is not given.
        """
        if self.module is not None:
            return getattr(self.module, name, default)
        if name in self.kwargs:
            return self.kwargs[name]
        given = position is not None and position < len(self.args)
        return self.args[position] if given else default  # type: ignore[index]


Factor = float | Callable[[Call], float | None]


@dataclass(frozen=True)
class Bound:
    """An entry of the table of bounds.

    Attributes:
        after: Returns ``k`` for a call, or ``None`` if these options have no known bound.
        piecewise_affine: Whether the operation is piecewise affine, as the paper assumes.
        keeps_order: Whether the entries that come out are those that go in, in the same order.
        joins: Whether several tensors that depend on the network's input may go in. Otherwise only
            the first may, and the others must be parameters or constants.
    """

    after: Callable[[Call], float | None]
    piecewise_affine: bool = True
    keeps_order: bool = False
    joins: bool = False


def by_factor(factor: Factor, *, piecewise_affine: bool = True, keeps_order: bool = False) -> Bound:
    """Returns the bound of an operation of one tensor from its Lipschitz constant."""

    def after(call: Call) -> float | None:
        found = factor(call) if callable(factor) else factor
        return None if found is None else found * call.constants[0]

    return Bound(after, piecewise_affine, keeps_order)
