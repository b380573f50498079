"""What runs inside what when a network runs, and whether a linear layer makes its outputs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch, copied, mapped, rows_of, run
from .running import GOES_IN, INPUT, evaluating, first_tensor

__all__ = ["Call", "few", "label", "linear_head", "sampled", "trace"]


# So many numbers of every output are kept while a network is looked at, to be compared.
_KEPT = 1 << 16
# Rows that a network is looked at with.
_ROWS = 16


@dataclass
class Call:
    """One run of a module, and the runs it made.

    Attributes:
        name: The module's name.
        module: The module.
        number: How often it ran before.
        input_shape: Shape of its first argument, if that is a tensor.
        output_shape: Shape of its output.
        input_problem: Why its input cannot be a representation; empty if it can.
        problem: The same of its output.
        calls: The runs it made.
        given: A copy of what a linear layer was given.
        made: Some entries of its output.
        head: Of the outermost run, the linear layer whose output is the network's.
        every: Of the outermost run, all runs inside it.
    """

    name: str
    module: nn.Module
    number: int = 0
    input_shape: torch.Size | None = None
    output_shape: torch.Size | None = None
    input_problem: str = ""
    problem: str = ""
    calls: list[Call] = field(default_factory=list)
    given: Tensor | None = None
    made: Tensor | None = None
    head: Call | None = None
    every: list[Call] = field(default_factory=list)


def linear_head(network: nn.Module, x: Batch) -> str | None:
    """The name of the linear layer whose output is the network's, if there is one.

    Args:
        network: The network; it runs once on a few rows of ``x``, in evaluation mode.
        x: A batch of inputs.
    """
    head = trace(network, few(x)).head
    return None if head is None else head.name


def label(call: Call, runs: Mapping[nn.Module, int]) -> str:
    """The name of a run's output as a representation.

    Args:
        call: The run.
        runs: How often each module runs in one pass.
    """
    name = f"./{call.name}" if call.name == INPUT else call.name
    return f"{name}#{call.number}" if runs[call.module] > 1 else name


def _problem(h: Tensor, what: str, rows: int) -> str:
    """Why this tensor cannot be a representation of so many rows; empty if it can."""
    if not h.is_floating_point():
        return f"{what} is {h.dtype}, not real numbers"
    if h.dim() < 2 or len(h) != rows:
        return (
            f"{what} has shape {tuple(h.shape)} for a batch of {rows}; "
            "expected (B, ...) with the batch first"
        )
    return ""


def few(x: Batch) -> Any:
    """Rows to look at a network with: several, so that tensors which differ are seen to differ.

    One row is taken twice: of a single one nobody can tell a batch from a constant.
    """
    if not isinstance(x, Tensor):
        return mapped(x, few)
    return x[:_ROWS] if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1))


def trace(network: nn.Module, x: Batch) -> Call:
    """Run the network once and write down which module ran inside which, in order."""
    tracer = _Tracer(network, len(x) if isinstance(x, Tensor) else rows_of(x))
    with torch.no_grad(), evaluating(network):
        try:
            tracer.attach()
            # It may change its input in place.
            returned = network(x.clone()) if isinstance(x, Tensor) else run(network, copied(x))
            output = _logits(returned)
        finally:
            tracer.detach()
    root = tracer.outside.calls[0]
    root.every = tracer.outside.every[1:]
    for call, made, changes in tracer.linear:
        # The very memory, which no operation in place has changed since.
        if output is not None and _is_same(output, made) and _changes(made) == changes:
            root.head = call
    return root


class _Tracer:
    """Hooks on every module, and what they saw.

    Args:
        network: The network.
        rows: How many rows the batch has that it will run on.

    Attributes:
        outside: A call that stands for whoever runs the network.
        linear: Calls of linear layers, with what they made and how often that had been changed.
    """

    def __init__(self, network: nn.Module, rows: int) -> None:
        # What a parametrised layer (spectral norm, weight norm) runs to make its weights is no
        # layer.
        self._names = {
            module: name
            for name, module in reversed(list(network.named_modules()))
            if "parametrizations" not in name.split(".")
        }
        self._linears = {module for module in self._names if _is_linear(module)}
        self._rows, self._thread = rows, threading.get_ident()
        self._runs: Counter[nn.Module] = Counter()
        self._handles: list[Any] = []
        self.outside = Call("", nn.Identity())
        self._stack = [self.outside]
        self.linear: list[tuple[Call, Tensor, int]] = []

    def attach(self) -> None:
        """Put the hooks on."""
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before))
            self._handles.append(module.register_forward_hook(self._after))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:  # others may run the network meanwhile
            return
        call = Call(self._names[module], module, self._runs[module])
        self._runs[module] += 1
        self._stack[-1].calls.append(call)
        self._stack.append(call)
        self.outside.every.append(call)
        given: Any = args[0] if args else None
        if not isinstance(given, Tensor):
            try:
                given = first_tensor(args, call.name + GOES_IN)
            except TypeError as error:
                call.input_problem = str(error)
                return
        call.input_problem = _problem(given, "its input", self._rows)
        if given is args[0]:
            call.input_shape = given.shape
            if module in self._linears:
                call.given = given.clone()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        call, made = self._stack.pop(), output
        if not isinstance(made, Tensor):
            try:
                made = first_tensor(output, call.name)
            except TypeError as error:
                call.problem = str(error)
                return
        call.output_shape, call.problem = made.shape, _problem(made, "its output", self._rows)
        if not call.problem:
            call.made = sampled(made)
            if module in self._linears:
                self.linear.append((call, made, _changes(made)))


def _is_linear(module: nn.Module) -> bool:
    """Whether it multiplies its input by its weights, adds its bias, and does nothing else."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_same(output: Tensor, made: Tensor) -> bool:
    """Whether outputs ``(B, C)``, or ``(B,)`` for one, are in the memory of what a layer made."""
    if made.dim() != 2 or output.numel() != made.numel() or output.data_ptr() != made.data_ptr():
        return False
    return torch.equal(output.reshape(made.shape), made)


def _changes(tensor: Tensor) -> int:
    """How often it was changed in place, where torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def sampled(h: Tensor) -> Tensor:
    """Some of its entries, always at the same places of a row: all of them if they are few."""
    rows = h.reshape(len(h), -1)
    step = max(1, -(-rows.numel() // _KEPT))
    return rows[:, ::step].clone()


def _logits(output: Any) -> Tensor | None:
    """The tensor that the predictions are made of in what a network returned, if there is one."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None
