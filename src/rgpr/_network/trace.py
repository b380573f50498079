"""What runs inside what when a network runs, how the axes of tensors lie, and what is the head.

The network runs once on a few rows. Where the first axis of a tensor is not the only one that is as
long as there are rows, or is not, it runs again with another number of rows: the axis that changes
with it is the batch, so that it is known and not guessed.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .axes import says, usual
from .batches import Batch, copied, mapped, rows_of, run
from .guards import evaluating
from .outputs import default_part
from .representation import GOES_IN, INPUT, Representation
from .running import dense, first_tensor

__all__ = ["Call", "Side", "Trace", "few", "linear_head", "trace"]


# So many numbers of every tensor are kept while a network is looked at, to be compared.
_KEPT = 1 << 16
# Rows that a network is looked at with: a number that few axes have as their size.
_ROWS = 13


@dataclass(eq=False)
class Side:
    """A tensor that went into a module or came out of it.

    Attributes:
        shape: Its shape.
        batch: The axis of the batch.
        channel: The axis of the channels once the batch is first; ``None`` until it is known.
        problem: Why it cannot be a representation; empty if it can.
        sample: Some of its entries.
        turned: Whether its last axis is further apart in memory than its second.
        alike: Sides that are known to have their channels on the same axis.
    """

    shape: tuple[int, ...] = ()
    batch: int = 0
    channel: int | None = None
    problem: str = "it holds no tensor"
    sample: Tensor | None = None
    turned: bool = False
    alike: list[Side] = field(default_factory=list)

    def tell(self, channel: int | None) -> None:
        """Where the channels are, unless it is known; all sides alike hear it."""
        for side in (self, *self.alike):
            side.channel = channel if side.channel is None else side.channel

    def join(self, other: Side) -> None:
        """From now on the two have their channels on the same axis."""
        if other is self or other in self.alike:
            return
        alike = list({id(s): s for s in (self, *self.alike, other, *other.alike)}.values())
        for side in alike:
            side.alike = alike
        self.tell(next((s.channel for s in alike if s.channel is not None), None))

    @property
    def arranged(self) -> tuple[int, ...]:
        """The shape with the batch first."""
        rest = (*self.shape[: self.batch], *self.shape[self.batch + 1 :])
        return (self.shape[self.batch], *rest)

    @property
    def axis(self) -> int:
        """The axis of the channels, the usual one if nothing is known."""
        if len(self.shape) == 2:
            return 1
        return usual(self.shape) if self.channel is None else self.channel

    @property
    def width(self) -> int | None:
        """How many channels there are."""
        return self.arranged[self.axis] if len(self.shape) > 1 else None

    def is_same(self, other: Side) -> bool:
        """Whether both are the same representation: equal entries, and equally many channels.

        An image that is flattened holds the same numbers, but the residual reads the means over its
        positions, so it is another representation.
        """
        a, b = self.sample, other.sample
        return (
            a is not None
            and b is not None
            and prod(self.shape) == prod(other.shape)
            and (len(self.shape) == len(other.shape) == 2 or self.width == other.width)
            and a.dtype == b.dtype
            and torch.equal(a, b)
        )


@dataclass(eq=False)
class Call:
    """One run of a module, and the runs it made.

    Attributes:
        name: The module's name.
        module: The module.
        number: How often it ran before.
        given: The first tensor that it was given.
        made: What it made, or the first tensor of it.
        calls: The runs it made.
        layers: How many layers with weights ran, itself or inside it.
    """

    name: str
    module: nn.Module
    number: int = 0
    given: Side = field(default_factory=Side)
    made: Side = field(default_factory=Side)
    calls: list[Call] = field(default_factory=list)

    layers: int = 0


@dataclass
class Trace:
    """One run of a network.

    Attributes:
        network: The network.
        x: The rows it ran on.
        root: Its own run.
        every: All runs inside it, in the order in which they began.
        head: The linear layer whose output is the network's, as it was made.
    """

    network: nn.Module
    x: Any
    root: Call
    every: list[Call]
    head: Call | None = None

    def __post_init__(self) -> None:
        self._runs = Counter(call.module for call in self.every)

    def label(self, call: Call, *, goes_in: bool = False) -> str:
        """The name of what a run made as a representation, or of what went into it."""
        name = f"./{call.name}" if call.name == INPUT else call.name
        number = f"#{call.number}" if self._runs[call.module] > 1 else ""
        return name + number + (GOES_IN if goes_in else "")

    def representation(self, call: Call, *, goes_in: bool = False) -> Representation:
        """What a run made, or what went into it, as a representation."""
        side = call.given if goes_in else call.made
        name, dims = self.label(call, goes_in=goes_in), len(side.shape)
        channel = 1 if dims == 2 or side.axis in (1, 1 - dims) else side.axis
        return Representation(name, side.batch, channel)


def linear_head(network: nn.Module, x: Batch) -> str | None:
    """The name of the linear layer whose output is the network's, if there is one.

    Args:
        network: The network; it runs on a few rows of ``x``, in evaluation mode.
        x: A batch of inputs.
    """
    head = trace(network, few(x)).head
    return None if head is None else head.name


def _has_weights(module: nn.Module) -> bool:
    """Whether it computes with weights of its own, quantised ones too; to normalise is not that."""
    if hasattr(module, "num_features") or hasattr(module, "normalized_shape"):
        return False
    if isinstance(module, nn.GroupNorm | nn.PReLU | nn.LocalResponseNorm):
        return False
    # Vectors scale and shift what they are given, as other libraries' normalisations do.
    if any(tensor.dim() > 1 for tensor in module.parameters()):
        return True
    return callable(getattr(module, "weight", None))  # as quantised layers have it


def few(x: Batch) -> Any:
    """Rows to look at a network with: several, so that tensors which differ are seen to differ.

    One row is taken twice: of a single one nobody can tell a batch from a constant.
    """
    if not isinstance(x, Tensor):
        return mapped(x, few)
    return x[:_ROWS] if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1))


def trace(network: nn.Module, x: Batch) -> Trace:
    """Run the network and write down which module ran inside which, in order."""
    seen, tracer = _run(network, x)
    if tracer.ambiguous:
        again, other = _run(network, mapped(x, _other))
        for ours, theirs in zip(seen.every, again.every, strict=False):
            _settle(ours.given, theirs.given, "its input", (tracer.rows, other.rows))
            _settle(ours.made, theirs.made, "its output", (tracer.rows, other.rows))
    for call in seen.every:
        if len(call.made.shape) > 2:
            call.made.tell(_channel_of(call))
    return seen


def _other(x: Tensor) -> Tensor:
    """Another number of rows."""
    return x[1:] if len(x) > 2 else torch.cat([x, x[:1]])


def _run(network: nn.Module, x: Batch) -> tuple[Trace, _Tracer]:
    tracer = _Tracer(network, rows_of(x))
    with torch.no_grad(), evaluating(network) as modes, modes:
        try:
            tracer.attach()
            # It may change its input in place.
            returned = network(x.clone()) if isinstance(x, Tensor) else run(network, copied(x))
            output = default_part(returned)
        finally:
            tracer.detach()
    seen = Trace(network, x, tracer.outside.calls[0], tracer.every[1:])
    for call, made, changes in tracer.linear:
        # The very memory, which no operation in place has changed since.
        same = isinstance(output, Tensor) and _is_same(output, made)
        if same and _changes(made) == changes:
            seen.head = call
    return seen, tracer


def _settle(side: Side, other: Side, what: str, rows: tuple[int, int]) -> None:
    """The batch is the axis that was as long as there were rows both times."""
    if side.problem or len(side.shape) != len(other.shape) or len(side.shape) < 3:
        return
    axes = [a for a in (0, 1) if (side.shape[a], other.shape[a]) == rows]
    side.batch = axes[0] if axes else side.batch
    side.problem = "" if axes else _problem(side.shape, what, rows[0])


def _channel_of(call: Call) -> int | None:
    """The axis of the channels; if no one said it, as it is in the last layer inside."""
    made, given = call.made, call.given
    if made.channel is not None or len(made.shape) < 3:
        return made.channel
    square = made.arranged[1] == made.arranged[-1]
    if square and given.shape == made.shape and given.channel is not None:
        return given.channel  # a block that keeps the shape keeps the axes
    for inner in reversed(call.calls):
        channel = _channel_of(inner)
        if channel is not None and inner.made.shape == made.shape:
            # Of equally long axes, the order in memory tells whether they were turned around.
            turned = square and inner.made.turned != made.turned
            return -channel if turned and abs(channel) == 1 else channel
    # Axes were turned around after the last layer: its channels are where their number is.
    last = next((inner for inner in reversed(call.calls) if inner.layers), None)
    sizes = made.arranged
    axes = [] if last is None else [a for a in (1, -1) if sizes[a] == last.made.width]
    return axes[0] if len(axes) == 1 else None


class _Tracer:
    """Hooks on every module, and what they saw.

    Args:
        network: The network.
        rows: How many rows the batch has that it will run on.

    Attributes:
        outside: A call that stands for whoever runs the network.
        every: All calls.
        linear: Calls of linear layers, with what they made and how often that had been changed.
        ambiguous: Whether the second axis of a tensor was as long as the batch.
        rows: How many rows the batch has.
    """

    def __init__(self, network: nn.Module, rows: int) -> None:
        # What a parametrised layer (spectral norm, weight norm) runs to make its weights is no
        # layer.
        self._names = {
            module: name
            for name, module in reversed(list(network.named_modules()))
            if "parametrizations" not in name.split(".")
        }
        self.rows, self._thread = rows, threading.get_ident()
        self._runs: Counter[nn.Module] = Counter()
        self._handles: list[Any] = []
        self.outside = Call("", nn.Identity())
        self.every: list[Call] = []
        self._stack = [self.outside]
        self.linear: list[tuple[Call, Tensor, int]] = []
        self.ambiguous = False
        # What a tensor was seen as first, while it lives.
        self._sides: Any = WeakTensorKeyDictionary()

    def attach(self) -> None:
        """Put the hooks on."""
        for module in self._names:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            self._handles.append(before)
            self._handles.append(module.register_forward_hook(self._after))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any] | None = None
    ) -> None:
        # Others may run the network meanwhile. While a hook comes or goes, torch may call it
        # without the keywords, for them alone.
        if threading.get_ident() != self._thread:
            return
        call = Call(self._names[module], module, self._runs[module])
        self._runs[module] += 1
        self._stack[-1].calls.append(call)
        self._stack.append(call)
        self.every.append(call)
        given = next(iter(args or (named or {}).values()), None)
        call.given = self._side(given, call.name + GOES_IN, "its input")

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        call = self._stack.pop()
        call.made = self._side(output, call.name, "its output")
        call.layers = sum([inner.layers for inner in call.calls])
        if not call.calls:
            _leaf(call)
        # It multiplies its input by its weights, adds its bias, and does nothing else.
        linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if linear and not call.made.problem:
            self.linear.append((call, output, _changes(output)))

    def _side(self, value: Any, layer: str, what: str) -> Side:
        try:
            h = value if isinstance(value, Tensor) else first_tensor(value, layer)
        except TypeError as error:
            return Side(problem=str(error))
        if h.is_quantized or h.is_nested:
            h = dense(h)
        # The axes among the first two that may be the batch, of which the second needs three.
        axes = [a for a in (0, 1) if h.dim() > 1 + a and h.shape[a] == self.rows]
        self.ambiguous |= 1 in axes
        if not h.is_floating_point():
            return Side(h.shape, problem=f"{what} is {h.dtype}, not real numbers")
        if not axes:
            return Side(h.shape, problem=_problem(h.shape, what, self.rows))
        # Some of its entries, always at the same places of a row: all of them if they are few.
        rows = h.movedim(axes[0], 0).reshape(self.rows, -1)
        sample = rows[:, :: max(1, -(-rows.numel() // _KEPT))].clone()
        side = Side(h.shape, axes[0], problem="", sample=sample)
        if h.dim() > 2:
            side.turned = h.stride(1) < h.stride(-1)
            self._sides.setdefault(h, side).join(side)
        return side


def _leaf(call: Call) -> None:
    """Notice what a layer is, and tell whoever shares a tensor with it where its channels are."""
    call.layers = int(_has_weights(call.module))
    same = len(call.made.shape) > 2 and call.given.shape == call.made.shape
    if same and not call.layers:  # an activation, or a norm, which may run over positions
        call.made.join(call.given)
    for side in (call.given, call.made):
        if len(side.shape) > 2 and not side.problem:
            side.tell(says(call.module, side.arranged))
    if same:
        call.made.join(call.given)


def _is_same(output: Tensor, made: Tensor) -> bool:
    """Whether outputs ``(B, C)``, or ``(B,)`` for one, are in the memory of what a layer made."""
    if made.dim() != 2 or output.numel() != made.numel() or output.data_ptr() != made.data_ptr():
        return False
    return torch.equal(output.reshape(made.shape), made)


def _changes(tensor: Tensor) -> int:
    """How often it was changed in place, where torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _problem(shape: tuple[int, ...], what: str, rows: int) -> str:
    """Why a tensor of this shape cannot be a representation of so many rows."""
    return (
        f"{what} has shape {tuple(shape)} for a batch of {rows}; "
        "expected (B, ...) with the batch first, or (T, B, C)"
    )
