"""Reading representations in the pass that predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from .running import watching

__all__ = ["INPUT", "capture"]


INPUT = "input"
# After a module's name: what goes into it, instead of what comes out.
_GOES_IN = ":input"


@contextmanager
def capture(
    network: nn.Module, layers: Sequence[str], consume: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Hand each representation to ``consume(index, h)`` during the next pass.

    ``h`` is handed over at once, before an in-place operation can change it. The input is not
    handed over: whoever calls the network has it.

    Args:
        network: The network whose next pass, by this thread, is read.
        layers: Names as :func:`choose_layers` returns them, the input first.
        consume: Called with the index in ``layers`` and the representation, ``(B, ...)``.

    Raises:
        RuntimeError: On leaving, if a layer did not run.
    """
    outputs = _Wanted(network, layers, goes_in=False)
    inputs = _Wanted(network, layers, goes_in=True)
    missing = set(range(1, len(layers)))

    def take(index: int | None, value: Any) -> None:
        if index is not None:
            missing.discard(index)
            consume(index, _first_tensor(value, layers[index]))

    # An exporter may call the hook with a stand-in for the module, so each knows its own.
    def before(watched: nn.Module, _: nn.Module, args: tuple[Any, ...]) -> None:
        take(inputs.next_run(watched), args)

    def after(watched: nn.Module, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        take(outputs.next_run(watched), output)

    with watching(
        network,
        {module: partial(after, module) for module in outputs.runs},
        {module: partial(before, module) for module in inputs.runs},
    ):
        yield
    if missing:
        raise RuntimeError(
            f"the layers {[layers[i] for i in sorted(missing)]} did not run in this forward pass; "
            "a network whose path depends on its input needs layers that always run"
        )


class _Wanted:
    """Which runs of which modules are representations, and how often each module ran so far."""

    def __init__(self, network: nn.Module, layers: Sequence[str], *, goes_in: bool) -> None:
        self._indices: dict[nn.Module, dict[int, int]] = {}
        for index, layer in enumerate(layers[1:], start=1):
            if layer.endswith(_GOES_IN) == goes_in:
                name, number = _parse(layer)
                module = network.get_submodule(name)
                self._indices.setdefault(module, {})[int(number or 0)] = index
        self.runs: dict[nn.Module, int] = dict.fromkeys(self._indices, 0)

    def next_run(self, module: nn.Module) -> int | None:
        """The index of the representation that this run of the module gives, if any."""
        index = self._indices[module].get(self.runs[module])
        self.runs[module] += 1
        return index


def _parse(layer: str) -> tuple[str, str]:
    """The module's name and the number of its run, empty for all of them."""
    name, _, number = layer.removeprefix("./").removesuffix(_GOES_IN).partition("#")
    return name, number


def _first_tensor(output: Any, layer: str) -> Tensor:
    """The representation in a module's output: itself, or the first of a tuple."""
    while isinstance(output, tuple | list) and len(output) > 0:
        output = output[0]
    if not isinstance(output, Tensor):
        verb = "got" if layer.endswith(_GOES_IN) else "returned"
        raise TypeError(f"layer '{layer}' {verb} {type(output).__name__}, not a tensor")
    return output
