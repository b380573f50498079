"""Change somebody else's network for a while, and leave it as it was, whatever comes in between.

:class:`evaluating` switches modes for a while. They come back on every way out, that of an
interrupt at any point too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["Guard", "evaluating", "evaluating_or_not", "every_module", "in_evaluation"]


class Guard:
    """A change to somebody's network that is taken back, whatever comes in between.

    A guard is entered twice: ``with guard, guard:``. An interrupt, as by Ctrl-C, can come between
    any two steps of Python, at the start of ``__exit__`` too, which then does nothing. The other
    ``__exit__`` still takes the change back. The first entry changes nothing, so that an interrupt
    while the second makes the change finds a block that is left by an ``__exit__``.
    """

    _entries = 0
    _restored = False
    # A graph that is being compiled belongs to no thread.
    _compiling = False
    thread = 0

    def __enter__(self) -> Self:
        self._entries += 1
        if self._entries == 2:
            self._compiling = torch.compiler.is_compiling()
            if not self._compiling:
                self.thread = threading.get_ident()
                _changing.add(self)
            self._change()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if not self._restored:
            self.restore()
            if not self._compiling:
                _changing.discard(self)
            self._restored = True
            if kind is None:
                self._check()

    def _check(self) -> None:
        """Raise an error on leaving without one, where something is amiss."""
        if self._entries == 1:
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
        self._network = network
        self._switched: list[nn.Module] = []

    def _change(self) -> None:
        modules = every_module(self._network)
        if self._compiling:
            # Modes are constants of a compiled graph, which cannot hold a lock.
            if any(module.training for module in modules):
                raise RuntimeError("call .eval() on the model before compiling or exporting it")
            return
        # Also where all are in evaluation mode: another thread may have switched them just now.
        _locked(lambda: self._switch(modules))

    def _switch(self, modules: Sequence[nn.Module]) -> None:
        global _switches
        _switches += 1
        for module in modules:
            if module.training or module in _users:
                self._switched.append(module)
                _users.setdefault(module, set()).add(self)
                module.training = False

    def restore(self) -> None:
        if self._switched:
            _locked(self._switch_back)

    def _switch_back(self) -> None:
        global _switches
        _switches += 1
        for module in self._switched:
            users = _users.get(module)
            if users is not None:
                users.discard(self)
                if not users:
                    module.training = True
                    del _users[module]


def evaluating_or_not(network: nn.Module) -> AbstractContextManager[Any]:
    """:class:`evaluating`, or nothing where all modules are in evaluation mode of their own.

    Like every :class:`Guard`, what this returns is entered twice.
    """
    if not torch.compiler.is_compiling() and in_evaluation(every_module(network)):
        return nullcontext()
    return evaluating(network)


def every_module(network: nn.Module) -> list[nn.Module]:
    """All of its modules: ``network.modules()`` takes ten times as long, at every prediction."""
    found, waiting = {network}, [network]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found.add(module)
                waiting.append(module)
    return list(found)


# -- several threads, and processes that fork ----------------------------------------------------

# Modules that guards switched to evaluation mode, and the guards that rely on it just now.
_users: WeakKeyDictionary[nn.Module, set[Guard]] = WeakKeyDictionary()
_lock = threading.RLock()
# How often guards began to switch modules, or to switch them back.
_switches = 0
_training = attrgetter("training")


def in_evaluation(modules: Sequence[nn.Module]) -> bool:
    """Whether modules are in evaluation mode of their own, so that no guard will end it.

    Guards of other threads may switch modules while this looks at them. Then guards are in use
    before or after the look, or the number of switches changes in between.
    """
    before = _switches
    if _users or any(map(_training, modules)):
        return False
    return not _users and _switches == before


# The thread that does a step. A signal handler that predicts may come in between.
_holder: int | None = None


def _locked(step: Callable[[], None]) -> None:
    """Do a step while no other thread does one; an interrupt at any point leaves the lock free."""
    global _holder
    if _holder == threading.get_ident():
        step()
        return
    try:
        try:
            _lock.acquire()
            _holder = threading.get_ident()
            step()
        finally:
            _release()
    finally:
        _release()


def _release() -> None:
    global _holder
    try:
        if _holder == threading.get_ident():
            _holder = None
        _lock.release()
    except RuntimeError:  # it was released already
        return


def _forked() -> None:
    """In a process that was forked: other threads are gone, and their changes are taken back."""
    global _lock, _holder
    _lock, _holder = threading.RLock(), None
    for guard in [guard for guard in _changing if guard.thread != threading.get_ident()]:
        guard.restore()
        _changing.discard(guard)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
