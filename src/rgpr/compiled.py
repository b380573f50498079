"""A model's predictions as one compiled graph; see :meth:`rgpr.RGPR.compile`.

Hooks, which read the representations, would cut a graph into pieces, so the model is exported
first. The graph holds the model's own tensors: what changes in place is seen by it, and for others
in their place it is made anew.
"""

from __future__ import annotations

import threading
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .data import check_input
from .export import check_exportable, program
from .hooks import every_module
from .model import RGPR

__all__ = ["CompiledCall"]

# On a GPU some operations of an exported graph take no more rows.
_MOST_ROWS = 65535
# torch exports and compiles for one thread at a time.
_making = threading.RLock()
_Table = dict[Any, Any]


class CompiledCall:
    """What is called in place of a model.

    Args:
        model: A fitted model.
        options: What ``torch.compile`` is given.
    """

    def __init__(self, model: RGPR, options: dict[str, Any]) -> None:
        model._fitted()
        check_exportable(model)
        self._model, self._options = model, options
        self._graphs: dict[int | None, Any] = {}
        self._holders: tuple[list[_Table], ...] = [], [], []
        self._made_of: list[list[Any]] = []

    def __call__(self, x: Tensor, **options: Any) -> Any:
        model = self._model
        if options or not self._plain(x):
            return model._call_impl(x, **options)  # type: ignore[no-untyped-call]
        check_input(x, model.posterior.network, model._input_shape)
        if self._graphs:
            hooks, *contents = _contents(*self._holders)
            if hooks != self._made_of[0]:  # somebody watches the network: no graph would tell them
                return model._call_impl(x)  # type: ignore[no-untyped-call]
            if contents != self._made_of[1:]:
                self._graphs = {}
        # As torch.compile does: a graph for the first size of a batch, and one for all others.
        graphs = self._graphs
        size = len(x) if not graphs or len(x) in graphs else None
        if size in graphs:
            return graphs[size](x)
        with _making:
            if size not in graphs:
                self._holders = _holders(model)
                self._made_of = _contents(*self._holders)
                exported = _unchecked(program(model, x, dynamic=size is None))
                graphs[size] = torch.compile(exported, **self._options)
            return graphs[size](x)  # which compiles

    def _plain(self, x: Any) -> bool:
        """Whether the graph can do this call: without gradients, autocast or hooks."""
        model = self._model
        return (
            isinstance(x, Tensor)
            and x.dim() > 0
            and len(x) > 0
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.is_autocast_enabled(x.device.type)
            and not (x.is_cuda and len(x) > _MOST_ROWS)
            and not model._forward_hooks
            and not model._forward_pre_hooks
        )


def _unchecked(exported: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The program without checks of its input, which was checked before."""
    knows = "check_guards" in signature(exported.module).parameters  # since torch 2.9
    module = exported.module(**({"check_guards": False} if knows else {}))
    module._forward_pre_hooks.clear()
    return module


def _holders(model: RGPR) -> tuple[list[_Table], ...]:
    """The tables that hold the network's hooks, and the model's modules and tensors."""
    every = every_module(model)
    watched = [m for m in every if m is not model]
    hooks = [t for m in watched for t in (m._forward_hooks, m._forward_pre_hooks)]
    modules = [m._modules for m in every]
    return hooks, modules, [t for m in every for t in (m._parameters, m._buffers)]


def _contents(hooks: list[_Table], modules: list[_Table], tensors: list[_Table]) -> list[list[Any]]:
    """What the tables hold; every call compares it, so it is made of few, fast steps.

    Tensors by their ids: the graph keeps those that it was made of alive.
    """
    parts = [*chain.from_iterable([table.values() for table in modules])]
    held = [t for table in tensors for t in table.values() if t is not None]
    dtypes, devices = [t.dtype for t in held], [t.device for t in held]
    return [[*map(len, hooks)], parts, [*map(id, held)], dtypes, devices]
