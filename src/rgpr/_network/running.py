"""Run somebody else's network and leave it as it was: its mode, its hooks, its other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = [
    "After",
    "Before",
    "evaluating",
    "every_module",
    "network_dtype_device",
    "plain_module",
    "watching",
]

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

    def ours() -> bool:
        return not finished and (compiling or threading.get_ident() == owner)

    def run_after(handler: After) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if ours():
                handler(module, args, output)

        return hook

    def run_before(handler: Before) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if ours():
                handler(module, args)

        return hook

    def finish(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal finished
        if ours():
            finished = True

    handles = []
    try:
        for module, handle_before in (before or {}).items():
            handles.append(module.register_forward_pre_hook(run_before(handle_before)))
        for module, handle_after in after.items():
            handles.append(module.register_forward_hook(run_after(handle_after)))
        handles.append(network.register_forward_hook(finish))
        yield
    finally:
        for handle in handles:
            handle.remove()


def network_dtype_device(network: nn.Module) -> tuple[torch.dtype | None, torch.device | None]:
    """What the network computes in; ``(None, None)`` for one without floating-point tensors."""
    for tensor in chain(network.parameters(), network.buffers()):  # usually the very first
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return None, None
