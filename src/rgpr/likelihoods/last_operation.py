"""By which operations a tensor was made, seen while torch runs them.

Torch calls the recorder for every operation, also without gradients, so a function is seen as well
as a module. What is written down belongs to the memory of a tensor: whatever shows the same
numbers in another shape shares that memory, and needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["last_operations"]

# Operations that give the numbers they read, or mixtures of them: what made those stands.
_KEEPS = {"clone", "copy", "contiguous", "to", "to_copy", "reshape", "flatten", "repeat", "flip"}
_KEEPS |= {"cat", "concat", "stack", "index", "index_put", "index_select", "gather", "where"}
_KEEPS |= {"clamp", "clamp_min", "clamp_max", "nan_to_num", "masked_fill", "mul", "div", "rsub"}
_KEEPS |= {"mean", "amax", "amin", "max", "min"}
# Operations whose numbers come from nowhere; they make what others fill.
_CONSTANTS = {"zeros_like", "ones_like", "empty_like", "full_like", "zero", "fill"}
_CONSTANTS |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}
# One word for each operation that has several names.
_WORDS = {
    "sigmoid": "Sigmoid",
    "special_expit": "Sigmoid",
    "hardsigmoid": "Hardsigmoid",
    "log_sigmoid": "LogSigmoid",
    "log_sigmoid_forward": "LogSigmoid",
    "softmax": "Softmax",
    "safe_softmax": "Softmax",
    "log_softmax": "LogSoftmax",
}
# What becomes of these by an exponential or a logarithm.
_TURNED = {
    "exp": {"LogSigmoid": "Sigmoid", "LogSoftmax": "Softmax"},
    "log": {"Sigmoid": "LogSigmoid", "Softmax": "LogSoftmax"},
}


def last_operations(run: Callable[[], Tensor]) -> frozenset[str]:
    """The last operations behind the numbers of the tensor that ``run`` gives.

    Those that only move, bound, scale or average numbers are looked through.

    Returns:
        Several words if its parts were made in several ways, and none if it is not known.
    """
    recorder = _Recorder()
    try:
        with recorder:
            made = run()
    except RuntimeError:
        return frozenset()  # compiled parts of a network may refuse to run while they are watched
    return recorder.made_by([made])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down for each piece of memory by which operations its numbers were made."""

    # They are seen like any other operation; a network that uses them would fail otherwise.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak references, so that nothing is kept alive and no address is taken for another.
        self._made: dict[StorageWeakRef | None, frozenset[str]] = {}

    def made_by(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """The last operations behind all of these."""
        found = (self._made[memory] for memory in map(_memory, tensors) if memory in self._made)
        return frozenset().union(*found)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        read = _numbers((args, kwargs))
        before = {_memory(t) for t in read}
        changes = getattr(getattr(func, "_schema", None), "is_mutable", False)
        operations = self._operations(func.__name__.split(".")[0].strip("_"), read)
        for tensor in _numbers(returned):
            memory = _memory(tensor)
            if memory is None:
                continue
            if memory not in before:
                self._made[memory] = operations
            elif changes:
                whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
                rest = frozenset() if whole else self.made_by([tensor])
                self._made[memory] = operations | rest
        return returned

    def _operations(self, name: str, read: Sequence[Tensor]) -> frozenset[str]:
        """The last operations behind what an operation gives."""
        if name in _CONSTANTS or not read:
            return frozenset()
        before = self.made_by(read[1:] if name == "copy" else read)
        if name in ("mul", "div") and any(t.numel() > 1 and not self.made_by([t]) for t in read):
            return before | {name}  # with weights or inputs, and not with a number
        if name in _KEEPS:
            return before
        if name in _TURNED and before:
            return frozenset(_TURNED[name].get(each, name) for each in before)
        return frozenset({_WORDS.get(name, name)})


def _numbers(tree: Any) -> list[Tensor]:
    """The tensors of floating-point numbers in arguments or results, in their order."""
    found = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor for tensor in found if tensor.is_floating_point()]


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    """What stands for the memory of a tensor; ``None`` for one that has none of its own."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None  # a sparse one, or one that another library made
