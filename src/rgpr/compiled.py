"""A model's predictions as one compiled graph; see :meth:`rgpr.RGPR.compile`.

Hooks, which read the representations, would cut a graph into pieces, so the model is exported
first. The graph holds the model's own tensors: what changes in place is seen by it, and for others
in their place it is made anew.
"""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .data import check_input
from .export import check_exportable, program
from .hooks import every_module
from .model import RGPR

__all__ = ["CompiledCall"]

# torch exports and compiles for one thread at a time.
_making = threading.RLock()
_Table = dict[str, Any]


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
        self._holders: tuple[list[_Table], list[_Table]] = [], []
        self._made_of: list[list[Any]] = []

    def __call__(self, x: Tensor, **options: Any) -> Any:
        model = self._model
        if options or not self._plain(x):
            return model._call_impl(x, **options)  # type: ignore[no-untyped-call]
        check_input(x, model.posterior.network, model._input_shape)
        if self._graphs and self._made_of != _contents(*self._holders):
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
                exported = program(model, x, dynamic=size is None).module(check_guards=False)
                exported._forward_pre_hooks.clear()  # which check the input once more
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
            and not model._forward_hooks
            and not model._forward_pre_hooks
        )


def _holders(model: RGPR) -> tuple[list[_Table], list[_Table]]:
    """The tables that hold the model's modules, and those that hold its tensors."""
    every = every_module(model)
    modules = [module._modules for module in every if module._modules]
    tensors = [t for module in every for t in (module._parameters, module._buffers) if t]
    return modules, tensors


def _contents(modules: list[_Table], tensors: list[_Table]) -> list[list[Any]]:
    """What the tables hold; every call compares it, so it is made of few, fast steps."""
    parts = [*chain.from_iterable([table.values() for table in modules])]
    held = [t for table in tensors for t in table.values() if t is not None]
    return [parts, [*map(id, held)], [t.dtype for t in held], [t.device for t in held]]
