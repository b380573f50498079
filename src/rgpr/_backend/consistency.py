"""What a module consists of, noted once and compared at every call in a few microseconds.

Whatever was made of a module (a compiled graph, a recording) is made anew when the module consists
of other parts. Values that change in place are no other parts.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

__all__ = ["Consistency"]

_Table = dict[Any, Any]
_dtype, _device = attrgetter("dtype"), attrgetter("device")


class Consistency:
    """The modules, parameters and buffers of some modules.

    All loops are in C: on a small network a loop in Python takes as long as the network.

    Args:
        modules: The modules, and all that they hold.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        tables: list[_Table] = [t for m in modules for t in (m._modules, m._parameters, m._buffers)]
        self._tables, self._empty = [t for t in tables if t], [t for t in tables if not t]
        self._held = self._look()
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._kinds = self._look_at_kinds()

    @property
    def changed(self) -> bool:
        """Whether there are other modules or tensors, or of another dtype or device."""
        held = self._look()
        if any(self._empty) or len(held) != len(self._held):
            return True
        return not all(map(is_, held, self._held)) or self._look_at_kinds() != self._kinds

    def _look(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def _look_at_kinds(self) -> list[Any]:
        # Parameters change these in place; buffers are replaced.
        return [*map(_dtype, self._parameters), *map(_device, self._parameters)]
