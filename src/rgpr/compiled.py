"""A model's predictions as one compiled graph; see :meth:`rgpr.RGPR.compile`.

Hooks, which read the representations, would cut a graph into pieces, so the model is exported
first. The graph holds the model's own tensors: what changes in place is seen by it, and for others
in their place it is made anew.
"""

from __future__ import annotations

import threading
from inspect import signature
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .data import check_input
from .export import check_exportable, program
from .fused import kernels_in_graphs
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
        self._graphs: dict[Any, Any] = {}
        self._contents = _Contents(model)

    def __call__(self, x: Tensor, **options: Any) -> Any:
        model = self._model
        if options or not self._plain(x):
            return model._call_impl(x, **options)  # type: ignore[no-untyped-call]
        check_input(x, model.posterior.network, model._input_shape)
        graph = self._graphs.get(self._key(x))
        if graph is not None and self._contents.watched:  # no graph would tell those who watch
            return model._call_impl(x)  # type: ignore[no-untyped-call]
        # A GPU is at work while we look whether it is still the same model.
        ahead = graph(x) if graph is not None and x.is_cuda else None
        if self._contents.changed:
            self._graphs, graph = {}, None
        if graph is None:
            return self._first(x)
        return graph(x) if ahead is None else ahead

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        """As torch.compile does: a graph for the first size of a batch, and one for all others."""
        any_size = x.dtype, x.device
        key = (*any_size, len(x))
        return key if not self._graphs or key in self._graphs else any_size

    def _first(self, x: Tensor) -> Any:
        """Make a graph, and what it answers."""
        with _making:
            key = self._key(x)
            if key not in self._graphs:
                with torch.no_grad(), kernels_in_graphs(x):
                    self._model._fitted().packed(x)  # now: tracing sees no values
                    self._contents = _Contents(self._model)
                    exported = _unchecked(program(self._model, x, dynamic=len(x) not in key))
                self._graphs[key] = torch.compile(exported, **self._options)
            return self._graphs[key](x)  # which compiles

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


class _Contents:
    """What a model consists of. Every call looks at it, so that is done in few, fast steps."""

    def __init__(self, model: RGPR) -> None:
        every = every_module(model)
        watched = [m for m in every if m is not model]
        self._hooks = [t for m in watched for t in (m._forward_hooks, m._forward_pre_hooks)]
        self._modules: list[_Table] = [m._modules for m in every]
        self._parameters: list[_Table] = [m._parameters for m in every]
        self._buffers: list[_Table] = [m._buffers for m in every]
        self._counts, self._now, self._kinds = [*map(len, self._hooks)], *self._look()

    @property
    def watched(self) -> bool:
        """Whether hooks came, or went."""
        return [*map(len, self._hooks)] != self._counts

    @property
    def changed(self) -> bool:
        """Whether there are other modules or tensors, or of another dtype or device."""
        now, kinds = self._look()
        same = len(now) == len(self._now) and all(map(is_, now, self._now))
        return not same or kinds != self._kinds

    def _look(self) -> tuple[list[Any], list[Any]]:
        parameters = [p for table in self._parameters for p in table.values() if p is not None]
        held: list[Any] = [*parameters]
        for table in (*self._modules, *self._buffers):
            held += table.values()
        # Parameters change these in place; buffers are replaced.
        return held, [*(p.dtype for p in parameters), *(p.device for p in parameters)]
