"""Read somebody else's network while it runs, and leave it without a trace.

:class:`watching` puts hooks on for one pass, and :class:`capture` takes the representations out of
that pass. Both are guards, so that the hooks go on every way out. Other threads that run the same
network see nothing of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._backend.precision import full_precision
from .batches import Batch, measured, rows_of, unmasked, vectors
from .guards import Guard
from .representation import GOES_IN, Representation, parse_layer

__all__ = [
    "After",
    "Before",
    "capture",
    "first_tensor",
    "plain_module",
    "standing",
    "watching",
]

T = TypeVar("T")
# Where a module of torch keeps hooks that run before it, and after it.
_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
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


class _Hooks(Guard):
    """Hooks on the parts of a network.

    They are put where torch puts them, because registering them takes longer than they run. Their
    places are noted before, so that an interrupt at any point leaves none of them behind.
    """

    def __init__(self) -> None:
        # Modules, the names of their tables, and what is put there under which number. The tables
        # themselves may be replaced by others meanwhile.
        self._places: list[tuple[nn.Module, str, int, Any]] = []
        self._finished = False

    def _note(
        self, module: nn.Module, hook: Callable[..., Any], table: str, *, keywords: bool = False
    ) -> None:
        """Note a hook that is to be put into a table of a module, and whether it takes keywords."""
        # The handle gives nothing but a number that no other hook has. It is made of this guard,
        # because it keeps a weak reference, and the tables of a traced module do not allow any.
        number = RemovableHandle(self).id
        self._places.append((module, table, number, hook))
        if keywords:
            self._places.append((module, f"{table}_with_kwargs", number, True))

    def _mine(self) -> bool:
        """Whether what runs now is the pass that is watched: the first of this guard's thread."""
        return not self._finished and (self._compiling or threading.get_ident() == self.thread)

    def _finish(self, *_: Any) -> None:
        """Note that the pass is over: whatever this thread runs next is not watched."""
        if self._compiling or threading.get_ident() == self.thread:
            self._finished = True

    def _change(self) -> None:
        for module, table, number, hook in self._places:
            getattr(module, table)[number] = hook

    def _remove(self) -> None:
        for module, table, number, _ in self._places:
            getattr(module, table).pop(number, None)

    def restore(self) -> None:
        self._remove()
        # The hooks refer to this guard, and the guard to the hooks. While they do, everything that
        # was read stays in memory until Python's garbage collector runs.
        self._places = []


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
        for module, handle_before in (before or {}).items():
            self._note(module, self._seen(handle_before), _BEFORE)
        for module, handle_after in after.items():
            self._note(module, self._seen(handle_after), _AFTER)
        self._note(network, self._finish, _AFTER)

    def _seen(self, handler: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            if self._mine():
                handler(*arguments)

        return hook


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
        head: A module whose input is kept, too.

    Attributes:
        features: What went into that module, once for each of its runs.
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
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._network, self._layers, self._takes, self._x = network, layers, takes, x
        self._rows = x.shape[0] if isinstance(x, Tensor) else rows_of(x)
        self._mask = None if isinstance(x, Tensor) else unmasked(network, x)
        self.found: list[Any] = [None] * len(layers)
        self._missing = set(range(len(layers)))
        # How often each module that is read has run.
        self._counters: list[list[int]] = []
        before: dict[nn.Module, dict[int, int]] = {}
        after: dict[nn.Module, dict[int, int]] = {}
        for index, layer in enumerate(layers[1:], start=1):
            name, number, goes_in = parse_layer(layer.name)
            runs = (before if goes_in else after).setdefault(network.get_submodule(name), {})
            runs[int(number or 0)] = index
        source = layers[0].source
        if source is not None:
            after.setdefault(network.get_submodule(source), {})[0] = 0
        for module, runs in before.items():
            self._note(module, self._hook(runs, goes_in=True), _BEFORE, keywords=True)
        for module, runs in after.items():
            self._note(module, self._hook(runs), _AFTER)
        self.features: list[Any] = []
        if head is not None:
            self._note(head, self._keep, _AFTER)
        # Last, because the head may be the network itself.
        self._note(network, self._finish, _AFTER)

    def _keep(self, _: nn.Module, args: Any, output: Any) -> None:
        if self._mine():
            self.features.append(args[0])

    def _change(self) -> None:
        super()._change()
        if self._layers[0].source is None:
            x = self._x
            self._take(0, x if isinstance(x, Tensor) else measured(self._network, x))

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        first = not self._restored
        super().__exit__(kind, *about)
        if first and kind is not None and issubclass(kind, torch.OutOfMemoryError | MemoryError):
            raise self._too_large(about[0]) from about[0]

    def _too_large(self, error: BaseException) -> Exception:
        """An error of the same kind, which says for how many rows the memory did not suffice."""
        remedy = f"give smaller batches, such as batch_size={max(1, self._rows // 2)}"
        if self._rows < 2:
            remedy = "no smaller batch is possible"
        said = str(error).partition("\n")[0].rstrip(". ")
        kind = MemoryError if isinstance(error, MemoryError) else torch.OutOfMemoryError
        return kind(f"a batch of {self._rows} rows needs too much memory; {remedy} ({said})")

    def _check(self) -> None:
        super()._check()
        if self._missing:
            raise RuntimeError(
                f"the layers {[self._layers[i].name for i in sorted(self._missing)]} did not run "
                "in this forward pass; a network whose path depends on its input needs layers that "
                "always run"
            )

    def _take(self, index: int, h: Tensor) -> None:
        self._missing.discard(index)
        layer = self._layers[index]
        h = h if layer.plain else layer.arrange(h)
        if self._mask is not None and self._mask.fits(h):
            h = self._mask.mean(h) if layer.token is None else self._mask.at(h, layer.token)
        elif layer.token is not None and h.dim() == 3:
            h = h[..., layer.token]
        if layer.source is not None:
            h = vectors(h)
        if torch.is_autocast_enabled(h.device.type):
            with full_precision(h):
                self.found[index] = self._takes[index](h)
        else:
            self.found[index] = self._takes[index](h)

    def _hook(self, runs: Mapping[int, int], *, goes_in: bool = False) -> Callable[..., None]:
        """A hook for a module, some of whose runs in a pass are representations.

        Each module has a hook of its own, since an exporter may call it with a stand-in for the
        module.

        Args:
            runs: For the number of a run, the index of the representation.
            goes_in: Whether what goes into the module is read, before it runs.
        """
        counter = [-1]
        self._counters.append(counter)

        def read(h: Any) -> None:
            if not self._mine():
                return
            counter[0] += 1
            index = runs.get(counter[0])
            if index is None:
                return
            layer = self._layers[index]
            if not isinstance(h, Tensor):
                h = first_tensor(h, layer.name)
            if h.is_quantized or h.is_nested:
                h = dense(h, None if self._mask is None else self._mask.counted.shape[1])
            if h.shape[layer.batch] != self._rows:
                raise ValueError(
                    f"layer '{layer.name}' gives shape {tuple(h.shape)} for a batch of "
                    f"{self._rows}, which should be the size of axis {layer.batch}. Choose other "
                    "layers"
                )
            self._take(index, h)

        if goes_in:
            # Torch notes apart that a hook takes keywords, so another thread that runs the module
            # while the hook comes or goes may call it without them.
            return lambda _, args, named={}: read(next(iter(args or named.values()), None))
        return lambda _, args, output: read(output)


class standing(capture[None]):  # noqa: N801
    """:class:`capture` for many passes in turn over batches of one size.

    The hooks are made once, and the input is not read.

    Args:
        network: The network.
        layers: What is read; the input, which is the first, is not.
        takes: One function for each of the layers.
        x: Any batch of the size.
        head: A module whose input is kept, too.
    """

    def again(self) -> standing:
        """Be ready for the next pass."""
        self._entries, self._restored, self._finished = 0, False, False
        self._missing.update(range(1, len(self._layers)))
        self._missing.discard(0)
        self.features = []
        for counter in self._counters:
            counter[0] = -1
        return self

    def _change(self) -> None:
        _Hooks._change(self)

    def restore(self) -> None:
        self._remove()


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
