"""A model's predictions as one compiled graph; see :meth:`rgpr.RGPR.compile`.

Hooks, which read the representations, would cut a graph into pieces, so the model is exported
first. The graph holds the model's own tensors: what changes in place is seen by it, and for others
in their place it is made anew.
"""

from __future__ import annotations

import threading
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
        self._made_of: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __call__(self, x: Tensor, **options: Any) -> Any:
        model = self._model
        if options or not self._plain(x):
            return model._call_impl(x, **options)  # type: ignore[no-untyped-call]
        check_input(x, model.posterior.network, model._input_shape)
        if self._graphs and any(
            table.get(name) is not part or _kind(part) != kind
            for table, name, part, kind in self._made_of
        ):
            self._graphs = {}
        # As torch.compile does: a graph for the first size of a batch, and one for all others.
        graphs = self._graphs
        size = len(x) if not graphs or len(x) in graphs else None
        if size in graphs:
            return graphs[size](x)
        with _making:
            if size not in graphs:
                self._made_of = _parts(model)
                exported = program(model, x, dynamic=size is None).module()
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


def _parts(model: RGPR) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Every tensor and module in the model: where it is held, by what name, and what it is."""
    return [
        (table, name, part, _kind(part))
        for module in every_module(model)
        for table in (module._parameters, module._buffers, module._modules)
        for name, part in table.items()
    ]


def _kind(part: Any) -> Any:
    return (part.dtype, part.device) if isinstance(part, Tensor) else None
