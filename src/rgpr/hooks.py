"""Run somebody else's network and leave it as it was: its mode, its hooks, its other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["After", "Before", "evaluating", "plain_module", "watching"]

Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]

_mode_lock = threading.Lock()
_in_eval: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list[int]]] = WeakKeyDictionary()


def plain_module(network: nn.Module) -> nn.Module:
    """The module to hook: a compiled one is unwrapped, one that cannot be hooked is refused.

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
    if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{type(network).__name__} runs replicas of the network that cannot be watched; "
            "pass network.module"
        )
    return network


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every submodule's own mode again afterwards.

    Calls from several threads share one switch: the last to leave restores.
    """
    if torch.compiler.is_compiling():
        # Modes are constants of a compiled graph, which cannot hold a lock.
        if any(module.training for module in network.modules()):
            raise RuntimeError("call .eval() on the model before compiling or exporting it")
        yield
        return
    with _mode_lock:
        if network not in _in_eval:
            training = [module for module in network.modules() if module.training]
            for module in training:
                module.training = False
            _in_eval[network] = (training, [0])
        training, users = _in_eval[network]
        users[0] += 1
    try:
        yield
    finally:
        with _mode_lock:
            users[0] -= 1
            if users[0] == 0:
                del _in_eval[network]
                for module in training:
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
