"""A network whose every number is the one that a row has alone, whatever batch the row is in.

Matrix products round in another way in batches of another size, so a row of a bare network changes
by some last digits with its batch. To see what the library adds to that, a :class:`Replay` runs
each row by itself, keeps what every module got and gave, and puts that in place of what the modules
compute in a batch. What is then left of a difference is not the network's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class Replay:
    """Hooks on every module of a network, to be removed by :meth:`close`.

    Args:
        network: All of its modules take and give the rows of a batch on the first axis.
        x: The rows that will be asked about; those that are not finite are run as zeros, which is
            what the library gives to the network.
    """

    def __init__(self, network: nn.Module, x: Tensor) -> None:
        self._kept: dict[Any, list[Tensor]] = defaultdict(list)
        self._number: Counter[Any] = Counter()
        self._rows: Tensor | None = None
        self._handles: list[Any] = []
        for name, module in network.named_modules():
            before, after = self._hooks(name)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after))
        modes = {module: module.training for module in network.modules()}
        network.eval()
        finite = x.flatten(1).isfinite().all(1)
        with torch.no_grad():
            for row, good in zip(x.split(1), finite, strict=True):
                self._number.clear()
                network(row.clone() if good else torch.zeros_like(row))
        for module, mode in modes.items():
            module.training = mode

    def rows(self, index: Tensor) -> None:
        """The next calls are about these rows, in this order."""
        self._rows = index
        self._number.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
            if name == "":
                self._number.clear()  # another pass
            return (self._instead((name, "in"), inputs[0]), *inputs[1:])

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._instead((name, "out"), output[0]), *output[1:])
            return self._instead((name, "out"), output)

        return before, after

    def _instead(self, key: Any, seen: Tensor) -> Tensor:
        call = (*key, self._number[key])
        self._number[key] += 1
        if self._rows is None:
            self._kept[call].append(seen.detach().clone())
            return seen
        return torch.cat([self._kept[call][int(row)] for row in self._rows])
