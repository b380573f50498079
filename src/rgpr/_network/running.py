"""Run somebody else's network, read it on the way, and leave it as it was.

:func:`evaluating` switches modes for a while, :func:`watching` puts hooks on for one pass, and
:func:`capture` takes the representations out of that pass. Modes and hooks come back on every way
out, and other threads that run the same network see nothing of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._backend.precision import full_precision
from .batches import Batch, measured, rows_of, unmasked, vectors
from .masks import Mask
from .representation import GOES_IN, Representation, parse_layer

__all__ = [
    "After",
    "Before",
    "capture",
    "evaluating",
    "every_module",
    "first_tensor",
    "plain_module",
    "watching",
]

T = TypeVar("T")
Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]

_mode_lock = threading.Lock()
# Modules that we switched to evaluation mode, and how many calls rely on it just now.
_switched: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def plain_module(network: nn.Module) -> nn.Module:
    """The module to hook: what torch.compile returned is unwrapped, what takes no hooks refused.

    Raises:
        TypeError: Not an ``nn.Module``, or one whose submodules ignore hooks.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module, not {type(network).__name__}")
    original = getattr(network, "_orig_mod", None)  # inside what torch.compile returns
    if isinstance(original, nn.Module):
        network = original
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript module does not run Python hooks, so its representations cannot be "
            "read; pass the nn.Module it was made from"
        )
    for name, module in network.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                f"FullyShardedDataParallel ({name or 'the network'}) flattens the parts of a "
                "network, so that they cannot be found; pass the network itself, or shard it with "
                "torch.distributed.fsdp.fully_shard, which leaves the parts in place"
            )
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            part = f"the part '{name}' of the network" if name else "the network"
            raise TypeError(
                f"{part} is compiled, and compiled code does not run hooks; pass a network that is "
                "not (copy.deepcopy of one compiled in place is not), and compile the RGPR model"
            )
    if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{type(network).__name__} runs replicas of the network that cannot be watched; "
            "pass network.module"
        )
    return network


def every_module(network: nn.Module) -> list[nn.Module]:
    """All of its modules: ``network.modules()`` takes ten times as long, at every prediction."""
    found, waiting = {network}, [network]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found.add(module)
                waiting.append(module)
    return list(found)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every submodule's own mode again afterwards.

    Calls that overlap, from several threads or on networks that share parts, share the switches:
    the last to leave restores.
    """
    if torch.compiler.is_compiling():
        # Modes are constants of a compiled graph, which cannot hold a lock.
        if any(module.training for module in every_module(network)):
            raise RuntimeError("call .eval() on the model before compiling or exporting it")
        yield
        return
    with _mode_lock:
        ours = [m for m in every_module(network) if m.training or (_switched and m in _switched)]
        for module in ours:
            module.training = False
            _switched[module] = _switched.get(module, 0) + 1
    try:
        yield
    finally:
        with _mode_lock:
            for module in ours:
                _switched[module] -= 1
                if _switched[module] == 0:
                    del _switched[module]
                    module.training = True


@contextmanager
def watching(
    network: nn.Module,
    after: Mapping[nn.Module, After],
    before: Mapping[nn.Module, Before] | None = None,
) -> Iterator[None]:
    """Call handlers around the given submodules during the next pass through ``network``.

    Only the first pass that this thread makes inside the block is watched; what other threads
    run, and what runs after that pass, goes unseen. The hooks are removed on every way out.
    """
    compiling = torch.compiler.is_compiling()
    owner = 0 if compiling else threading.get_ident()
    finished = False

    def run(handler: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            if not finished and (compiling or threading.get_ident() == owner):
                handler(*arguments)

        return hook

    def finish(*_: Any) -> None:
        nonlocal finished
        finished = True

    handles = []
    try:
        for module, handle_before in (before or {}).items():
            handles.append(module.register_forward_pre_hook(run(handle_before)))
        for module, handle_after in after.items():
            handles.append(module.register_forward_hook(run(handle_after)))
        handles.append(network.register_forward_hook(run(finish)))
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- reading representations in the pass that predicts -------------------------------------------


@contextmanager
def capture(
    network: nn.Module,
    layers: Sequence[Representation],
    takes: Sequence[Callable[[Tensor], T]],
    x: Batch,
) -> Iterator[list[T]]:
    """Apply ``takes[i]`` to the representation ``layers[i]`` during the next pass.

    Each representation is taken at once, before an operation in place can change it, outside of
    autocast, and as ``(B, C, ...)``: positions come last. The input, which is the first of them, is
    taken before the pass. Where the batch has a mask, sequences are averaged over the positions
    that count, or read at the first or the last of them.

    Args:
        network: The network whose next pass, by this thread, is read.
        layers: What :func:`rgpr._network.layers.choose_layers` returns, the input first.
        takes: One function for each of the layers.
        x: The batch that will be run.

    Yields:
        A list that holds what each function returned. The input's entry is there at once unless
        a module stands in for it, the others when the pass has been made.

    Raises:
        RuntimeError: On leaving, if a layer did not run.
        ValueError: During the pass, if a representation does not have that many rows.
    """
    reader = _Reader(layers, takes, x.shape[0] if isinstance(x, Tensor) else rows_of(x))
    if not isinstance(x, Tensor):
        reader.mask = unmasked(network, x)
    before: dict[nn.Module, dict[int, int]] = {}
    after: dict[nn.Module, dict[int, int]] = {}
    for index, layer in enumerate(layers[1:], start=1):
        name, number, goes_in = parse_layer(layer.name)
        runs = (before if goes_in else after).setdefault(network.get_submodule(name), {})
        runs[int(number or 0)] = index
    source = layers[0].source
    if source is not None:
        after.setdefault(network.get_submodule(source), {})[0] = 0
    handles = []
    try:
        for module, runs in before.items():
            hook = reader.hook(runs, goes_in=True)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for module, runs in after.items():
            handles.append(module.register_forward_hook(reader.hook(runs)))
        handles.append(network.register_forward_hook(reader.finish))
        if source is None:
            reader.take(0, x if isinstance(x, Tensor) else measured(network, x))
        yield reader.found
    finally:
        for handle in handles:
            handle.remove()
    if reader.missing:
        raise RuntimeError(
            f"the layers {[layers[i].name for i in sorted(reader.missing)]} did not run in this "
            "forward pass; a network whose path depends on its input needs layers that always run"
        )


class _Reader(Generic[T]):
    """Takes the representations of the first pass that its thread makes."""

    def __init__(
        self, layers: Sequence[Representation], takes: Sequence[Callable[[Tensor], T]], rows: int
    ) -> None:
        self._layers, self._takes, self._rows = layers, takes, rows
        self.mask: Mask | None = None
        self.found: list[Any] = [None] * len(layers)
        self.missing = set(range(len(layers)))
        self._compiling = torch.compiler.is_compiling()
        self._owner = 0 if self._compiling else threading.get_ident()
        self._finished = False

    def take(self, index: int, h: Tensor) -> None:
        self.missing.discard(index)
        layer = self._layers[index]
        h = h if layer.plain else layer.arrange(h)
        if self.mask is not None and self.mask.fits(h):
            h = self.mask.mean(h) if layer.token is None else self.mask.at(h, layer.token)
        elif layer.token is not None and h.dim() == 3:
            h = h[..., layer.token]
        if layer.source is not None:
            h = vectors(h)
        if torch.is_autocast_enabled(h.device.type):
            with full_precision(h):
                self.found[index] = self._takes[index](h)
        else:
            self.found[index] = self._takes[index](h)

    def hook(self, runs: Mapping[int, int], *, goes_in: bool = False) -> Callable[..., None]:
        """A hook for a module, some of whose runs in a pass are representations.

        Each module has a hook of its own, since an exporter may call it with a stand-in for the
        module.

        Args:
            runs: For the number of a run, the index of the representation.
            goes_in: Whether what goes into the module is read, before it runs.
        """
        number = itertools.count()

        def read(h: Any) -> None:
            if self._finished or not (self._compiling or threading.get_ident() == self._owner):
                return
            index = runs.get(next(number))
            if index is None:
                return
            layer = self._layers[index]
            if not isinstance(h, Tensor):
                h = first_tensor(h, layer.name)
            if h.is_quantized or h.is_nested:
                h = dense(h, None if self.mask is None else self.mask.counted.shape[1])
            if h.shape[layer.batch] != self._rows:
                raise ValueError(
                    f"layer '{layer.name}' gives shape {tuple(h.shape)} for a batch of "
                    f"{self._rows}, which should be the size of axis {layer.batch}. Choose other "
                    "layers"
                )
            plain = layer.plain and self.mask is None
            if plain and not torch.is_autocast_enabled(h.device.type):
                self.missing.discard(index)
                self.found[index] = self._takes[index](h)
            else:
                self.take(index, h)

        if goes_in:
            return lambda _, args, named: read(next(iter(args or named.values()), None))
        return lambda _, args, output: read(output)

    def finish(self, *_: Any) -> None:
        """The pass is over; whatever this thread runs next is not read."""
        if self._compiling or threading.get_ident() == self._owner:
            self._finished = True


def first_tensor(output: Any, layer: str) -> Tensor:
    """The representation in a module's output: itself, or the first of a tuple or of a dict."""
    while isinstance(output, tuple | list | Mapping) and len(output) > 0:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        verb = "got" if layer.endswith(GOES_IN) else "returned"
        raise TypeError(f"layer '{layer}' {verb} {type(output).__name__}, not a tensor")
    return output


def dense(h: Tensor, length: int | None = None) -> Tensor:
    """Quantised numbers as real ones, and a nested tensor as one with zeros in its padding.

    Args:
        h: Any tensor. Torch's own transformer nests sequences that have a mask.
        length: So long sequences become, where they are nested; by default as the longest.
    """
    if h.is_quantized:
        return h.dequantize()
    if not h.is_nested:
        return h
    padded: Tensor = h.to_padded_tensor(0.0)
    if length is None or padded.dim() != 3:
        return padded
    return nn.functional.pad(padded, (0, 0, 0, length - padded.shape[1]))
