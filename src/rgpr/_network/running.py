"""Run somebody else's network, read it on the way, and leave it as it was.

:class:`evaluating` switches modes for a while, :class:`watching` puts hooks on for one pass, and
:class:`capture` takes the representations out of that pass. Modes and hooks come back on every way
out, that of an interrupt at any point too, and other threads that run the same network see nothing
of it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar
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
    "Guard",
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


class Guard:
    """A change to somebody's network that is taken back, whatever comes in between.

    A guard is entered twice: ``with guard, guard:``. An interrupt, as by Ctrl-C, can come between
    any two steps of Python, at the start of ``__exit__`` too, which then does nothing. The other
    ``__exit__`` still takes the change back. The first entry changes nothing, so that an interrupt
    while the second makes the change finds a block that is left by an ``__exit__``.
    """

    def __init__(self) -> None:
        self._entries = 0
        self._restored = False
        self.thread = 0 if torch.compiler.is_compiling() else threading.get_ident()

    def __enter__(self) -> Self:
        self._entries += 1
        if self._entries == 2:
            if not torch.compiler.is_compiling():
                _changing.add(self)
            self._change()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if not self._restored:
            self.restore()
            if not torch.compiler.is_compiling():
                _changing.discard(self)
            self._restored = True
        if kind is None and self._entries == 1:
            raise RuntimeError("this changed nothing; it is entered twice: with guard, guard")

    def _change(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        """Take back what was changed so far; to do it again does no harm."""
        raise NotImplementedError


# The guards whose changes are in force.
_changing: set[Guard] = set()


class evaluating(Guard):  # noqa: N801, which reads as what it does
    """Evaluation mode inside, every submodule's own mode again afterwards.

    Calls that overlap, from several threads or on networks that share parts, share the switches:
    the last to leave restores.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = network
        self._switched: list[nn.Module] = []

    def _change(self) -> None:
        modules = every_module(self._network)
        if torch.compiler.is_compiling():
            # Modes are constants of a compiled graph, which cannot hold a lock.
            if any(module.training for module in modules):
                raise RuntimeError("call .eval() on the model before compiling or exporting it")
            return
        if _users or any(module.training for module in modules):
            _locked(lambda: self._switch(modules))

    def _switch(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            if module.training or module in _users:
                self._switched.append(module)
                _users.setdefault(module, set()).add(self)
                module.training = False

    def restore(self) -> None:
        if self._switched:
            _locked(self._switch_back)

    def _switch_back(self) -> None:
        for module in self._switched:
            users = _users.get(module)
            if users is not None:
                users.discard(self)
                if not users:
                    module.training = True
                    del _users[module]


class _Hooks(Guard):
    """Hooks on the parts of a network.

    They are noted before they are registered, and found by what they are: an interrupt may come
    after torch has registered a hook and before it has returned the handle.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[tuple[nn.Module, Callable[..., Any], dict[str, Any] | None]] = []
        self._handles: list[Any] = []

    def before(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Note a hook that is to run before the module does."""
        self._hooks.append((module, hook, options))

    def after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Note a hook that is to run after the module."""
        self._hooks.append((module, hook, None))

    def _change(self) -> None:
        for module, hook, options in self._hooks:
            if options is None:
                self._handles.append(module.register_forward_hook(hook))
            else:
                self._handles.append(module.register_forward_pre_hook(hook, **options))

    def restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        if len(self._handles) < len(self._hooks):
            for module, hook, options in self._hooks:
                kind = "_forward_hooks" if options is None else "_forward_pre_hooks"
                registered = getattr(module, kind)
                for key in [key for key, value in registered.items() if value is hook]:
                    getattr(module, f"{kind}_with_kwargs").pop(key, None)
                    registered.pop(key, None)


class watching(_Hooks):  # noqa: N801
    """Call handlers around the given submodules during the next pass through ``network``.

    Only the first pass that this thread makes inside the block is watched; what other threads
    run, and what runs after that pass, goes unseen.
    """

    def __init__(
        self,
        network: nn.Module,
        after: Mapping[nn.Module, After],
        before: Mapping[nn.Module, Before] | None = None,
    ) -> None:
        super().__init__()
        self._compiling = torch.compiler.is_compiling()
        self._finished = False
        for module, handle_before in (before or {}).items():
            self.before(module, self._seen(handle_before))
        for module, handle_after in after.items():
            self.after(module, self._seen(handle_after))
        self.after(network, self._seen(self._finish))

    def _seen(self, handler: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            if not self._finished and (self._compiling or threading.get_ident() == self.thread):
                handler(*arguments)

        return hook

    def _finish(self, *_: Any) -> None:
        self._finished = True


# -- several threads, and processes that fork ----------------------------------------------------

# Modules that guards switched to evaluation mode, and the guards that rely on it just now.
_users: WeakKeyDictionary[nn.Module, set[Guard]] = WeakKeyDictionary()
_lock = threading.RLock()


def _locked(step: Callable[[], None]) -> None:
    """Do a step while no other thread does one; an interrupt at any point leaves the lock free."""
    try:
        try:
            _lock.acquire()
            step()
        finally:
            _release()
    finally:
        _release()


def _release() -> None:
    try:
        _lock.release()
    except RuntimeError:  # it was released already
        return


def _forked() -> None:
    """In a process that was forked: other threads are gone, and their changes are taken back."""
    global _lock
    _lock = threading.RLock()
    for guard in [guard for guard in _changing if guard.thread != threading.get_ident()]:
        guard.restore()
        _changing.discard(guard)


os.register_at_fork(after_in_child=_forked)


# -- reading representations in the pass that predicts -------------------------------------------


class capture(_Hooks, Generic[T]):  # noqa: N801
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

    Attributes:
        found: What each function returned. The input's entry is there on entering unless a module
            stands in for it, the others when the pass has been made.

    Raises:
        RuntimeError: On leaving, if a layer did not run.
        ValueError: During the pass, if a representation does not have that many rows.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Sequence[Representation],
        takes: Sequence[Callable[[Tensor], T]],
        x: Batch,
    ) -> None:
        super().__init__()
        self._network, self._layers, self._x = network, layers, x
        rows = x.shape[0] if isinstance(x, Tensor) else rows_of(x)
        self._reader: _Reader[T] = _Reader(layers, takes, rows)
        if not isinstance(x, Tensor):
            self._reader.mask = unmasked(network, x)
        self.found: list[T] = self._reader.found
        self._plan()

    def _plan(self) -> None:
        before: dict[nn.Module, dict[int, int]] = {}
        after: dict[nn.Module, dict[int, int]] = {}
        network, source = self._network, self._layers[0].source
        for index, layer in enumerate(self._layers[1:], start=1):
            name, number, goes_in = parse_layer(layer.name)
            runs = (before if goes_in else after).setdefault(network.get_submodule(name), {})
            runs[int(number or 0)] = index
        if source is not None:
            after.setdefault(network.get_submodule(source), {})[0] = 0
        for module, runs in before.items():
            self.before(module, self._reader.hook(runs, goes_in=True), with_kwargs=True)
        for module, runs in after.items():
            self.after(module, self._reader.hook(runs))
        self.after(network, self._reader.finish)

    def _change(self) -> None:
        super()._change()
        if self._layers[0].source is None:
            x = self._x
            self._reader.take(0, x if isinstance(x, Tensor) else measured(self._network, x))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        missing = self._reader.missing
        if kind is None and missing:
            raise RuntimeError(
                f"the layers {[self._layers[i].name for i in sorted(missing)]} did not run in this "
                "forward pass; a network whose path depends on its input needs layers that always "
                "run"
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
