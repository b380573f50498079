r"""An upper bound on how fast a network's outputs can grow, carried along its graph.

The network is traced with ``torch.fx``. Its input :math:`c + s z` has the constant
:math:`k = \max_i |s_i|`, parameters have ``k = 0``, and every operation turns the constants of what
goes in into that of what comes out, by its entry in :mod:`rgpr.guarantee.table`. Along a chain
constants multiply, and at residual connections they add. The output's constant ``K`` then satisfies

.. math:: \|f(c + s z) - f(c + s z')\| \le K \|z - z'\|.

Every entry is an upper bound, never an estimate from below. An operation without an entry is
refused by name, and so is a network whose graph does not compute what the network computes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._network.guards import evaluating
from .operations import Bound, Call, NotBoundedError
from .table import bound_of_call, bound_of_module, registered_functions

__all__ = ["NotBoundedError", "lipschitz"]

# Covers the roundings of the constants themselves.
_SLACK = 1 + 1e-6
# What a network may read of a tensor without reading its values.
_OF_SHAPE = {"device", "dim", "dtype", "is_contiguous", "is_cuda", "is_floating_point", "ndim"}
_OF_SHAPE |= {"ndimension", "nelement", "numel", "requires_grad", "shape", "size", "stride"}


def lipschitz(
    network: nn.Module, center: Tensor, scale: Tensor, *, quick: bool = False
) -> tuple[float, Tensor, bool]:
    """Bound ``z -> network(center + scale * z)``.

    Args:
        network: The network; it runs in evaluation mode.
        center: One input, without a batch dimension.
        scale: Scale of each entry of the input, of the same shape.
        quick: Return a number that the bound is not below, without decomposing any matrix. A caller
            with no use for a bound that large need not compute it.

    Returns:
        The constant, the outputs ``(C,)`` at the center, and whether all parts of the network are
        piecewise affine.

    Raises:
        NotBoundedError: Names the first part that has no bound.
    """
    # Inside another module, the network's own hooks and defaults are part of what is traced.
    whole = nn.Sequential(network)
    with evaluating(network) as modes, modes, torch.no_grad():
        tracer = _Tracer(autowrap_functions=registered_functions())
        try:
            graph = fx.GraphModule(whole, tracer.trace(whole))
        except Exception as error:  # a forward pass may raise anything on symbols
            raise NotBoundedError(
                f"the network cannot be traced ({error}), so its parts are not known; its forward "
                "pass must not depend on the values of its input"
            ) from error
        walk = _Walk(graph, scale, quick)
        walk.extra_traceback = False  # the message says which part it is
        output = walk.run(center[None])
        if not isinstance(output, Tensor) or walk.result is None:
            raise NotBoundedError(
                f"the network returns {type(output).__name__}, not a tensor of outputs"
            )
        if not quick:
            _check_graph(graph, network, center, scale)
    return walk.result * _SLACK, output.reshape(-1), walk.affine


def _check_graph(graph: fx.GraphModule, network: nn.Module, center: Tensor, scale: Tensor) -> None:
    """Refuse a graph that differs from the network: tracing loses a branch on types or values."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((4, *center.shape), generator=generator).to(center)
    sizes = torch.tensor([0.0, 1.0, 10.0, 1000.0]).to(center).reshape(-1, *[1] * center.dim())
    x = center + scale.to(center) * noise * sizes
    ours, theirs = graph(x.clone()), network(x.clone())
    close = isinstance(theirs, Tensor) and torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2)
    if not close:
        raise NotBoundedError(
            "the network's traced graph does not compute what the network does: its forward pass "
            "depends on more than its input, so no bound is known"
        )


class _Tracer(fx.Tracer):
    """Leaves whole what the table knows, and remembers where every other call was made."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bound_of_module(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["caller"] = _caller()
        return node


def _caller() -> str:
    """Returns the name of the innermost function on the stack that is not torch's or ours."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return str(frame.f_code.co_name)


class _Walk(fx.Interpreter):
    """Runs the graph on one input and carries the constants along."""

    def __init__(self, graph: fx.GraphModule, scale: Tensor, quick: bool) -> None:
        super().__init__(graph)
        self.scale, self.quick = scale, quick
        self.constants: dict[fx.Node, float] = {}
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.result: float | None = None
        self.affine = True
        # Nodes whose entries are those of the network's input, in its order.
        self.plain: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if module is not None:
            _refuse_module(n, module)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if _in_place(n, module, kwargs) and self._operands(n):
            self._refuse_aliases(n)
        value = super().run_node(n)
        if n.op == "output":
            source = n.args[0]
            self.result = self.constants.get(source) if isinstance(source, fx.Node) else None
        elif isinstance(value, Tensor):
            self.shapes[n] = value.shape
            self.constants[n] = self._constant(n, module, args, kwargs)
        else:
            self._refuse_values(n, module)
        return value

    def _constant(
        self, n: fx.Node, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float:
        """Returns the constant of the tensor that a node makes, whose shape is already known."""
        if n.op == "placeholder":
            self.plain.add(n)
            return float(self.scale.double().abs().max())
        operands = self._operands(n)
        if not operands:
            return 0.0  # a parameter, or made of constants alone
        bound = bound_of_call(n.target) if module is None else bound_of_module(module)
        if bound is None or "out" in kwargs or not self._is_one(bound, operands):
            raise NotBoundedError(_unknown(n, module))
        plain = operands[0] in self.plain
        after = bound.after(
            Call(
                constants=tuple(self.constants[a] for a in operands),
                shapes=tuple(self.shapes[a] for a in operands),
                made=self.shapes[n],
                module=module,
                function=n.target if callable(n.target) else None,
                args=() if module else args,
                kwargs={} if module else kwargs,
                scale=self.scale if plain else None,
                quick=self.quick,
            )
        )
        if after is None:
            raise NotBoundedError(_unknown(n, module))
        if plain and bound.keeps_order:
            self.plain.add(n)
        self.affine = self.affine and bound.piecewise_affine
        return after

    def _operands(self, n: fx.Node) -> list[fx.Node]:
        """Returns the tensors that go into a node, each as often as it does."""
        found: list[fx.Node] = []
        fx.map_arg((n.args, n.kwargs), found.append)
        return [a for a in found if a in self.constants]

    def _is_one(self, bound: Bound, operands: list[fx.Node]) -> bool:
        """Whether the operation is a function of one tensor, if its bound asks for that."""
        return bound.joins or not any(self.constants[a] for a in operands[1:])

    def _refuse_values(self, n: fx.Node, module: nn.Module | None) -> None:
        """Refuse a number or a tuple that depends on the values of the network's input.

        No constant is carried through numbers and tuples, so whatever is made of them would look
        like a constant. Sizes are the same for every input.
        """
        depends = any(self.constants[a] for a in self._operands(n))
        what = n.args[1] if n.target is getattr else _called(n)
        if module is not None or (depends and what not in _OF_SHAPE):
            raise NotBoundedError(_unknown(n, module))

    def _refuse_aliases(self, n: fx.Node) -> None:
        """Refuse a change in place of memory that the network reads again under another name."""
        changed = self._operands(n)[0]
        memory = self.env[changed].untyped_storage().data_ptr()
        read_later = self.env.keys() - self.user_to_last_uses.get(n, [])
        for value in (self.env[node] for node in read_later):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                raise NotBoundedError(
                    f"the network changes '{changed.name}' in place and uses it again, for which "
                    "no Lipschitz bound is known"
                )


def _refuse_module(n: fx.Node, module: nn.Module) -> None:
    """Refuse a module that the table's entry for its class does not describe."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotBoundedError(f"{_name(n)} has hooks, which may change its outputs; remove them")
    if getattr(module, "running_var", module) is None:
        raise NotBoundedError(
            f"{_name(n)} is a {type(module).__name__} without running statistics; it divides "
            "by the batch's own spread, which has no bound"
        )


def _name(n: fx.Node) -> str:
    """Returns the name that a called module has in the user's network."""
    name = str(n.target).partition(".")[2]
    return f"'{name}'" if name else "the network"


def _called(n: fx.Node) -> str:
    """Returns the name of a called function or method."""
    return str(getattr(n.target, "__name__", n.target))


def _unknown(n: fx.Node, module: nn.Module | None) -> str:
    """Returns why a node is refused, and what the user can do."""
    if module is not None:
        kind = type(module).__name__
        what, which = f"{_name(n)} is a {kind}", kind
    else:
        what, which = f"the network calls {_called(n)}{_where(n)}", "operation"
    return (
        f"{what}, for which no Lipschitz bound is known; if you know one, give it by "
        f"rgpr.guarantee.register_bound({which}, bound)"
    )


def _where(n: fx.Node) -> str:
    """Returns in which of the user's functions or modules a call was made."""
    caller = n.meta.get("caller", "forward")
    path, kind = next(reversed(n.meta.get("nn_module_stack", {"": ("", None)}).values()))
    inside = path.partition(".")[2]
    if caller != "forward":
        return f" in {caller}"
    return f" in '{inside}', a {getattr(kind, '__name__', kind)}" if inside else ""


def _in_place(n: fx.Node, module: nn.Module | None, kwargs: Mapping[str, Any]) -> bool:
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = _called(n)
    known = n.target in (operator.iadd, operator.isub) or bool(kwargs.get("inplace"))
    is_call = n.op in ("call_function", "call_method")
    return is_call and (known or (name.endswith("_") and not name.startswith("_")))
