"""A batch of inputs in whatever form a network takes it: all that depends on the form is here.

A batch is one tensor, a dict of tensors (also Hugging Face's ``BatchEncoding``), or a tuple of
tensors. Its *parts* are these tensors, each with one row for every example. Those of real numbers
are measured as the input; integers and booleans (ids, masks, positions) travel along.

How a network is called follows from the signature of its ``forward``: a dict goes in by keywords if
its keys are parameters; otherwise a network that takes one argument gets the entry of a usual name,
or the whole dict. A tuple goes in by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._backend.arithmetic import pooled
from .masks import Mask, is_mask, mask_of

__all__ = [
    "INPUT_KEYS",
    "Batch",
    "Shape",
    "Taken",
    "arguments",
    "copied",
    "dtype_of",
    "first_part",
    "gathered",
    "largest",
    "mapped",
    "measured",
    "named",
    "numbers",
    "refuse_packed",
    "rows_of",
    "run",
    "shape_from_json",
    "shape_of",
    "shape_to_json",
    "taken_by",
    "taken_of",
    "unmasked",
    "vectors",
    "zeroed",
]

Batch = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
# The shape of one input: of a tensor its size; otherwise the size of each part that is measured,
# with None where sequences may have any length.
Shape = torch.Size | dict[str, tuple[int | None, ...]]

# What the one input of a network is usually called in a dict.
INPUT_KEYS = ("x", "input", "inputs", "image", "images", "pixel_values", "features", "data")


# -- how a network is called ---------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """What the ``forward`` of a network takes.

    Attributes:
        positional: Names of the parameters that can be given by position.
        names: Names of the parameters that can be given by keyword.
        required: Names of the parameters by position that have no default.
        optional: Names of those that are ``None`` unless given, as tensors may be.
        any_number: Whether it takes any number of arguments by position.
        any_name: Whether it takes keywords of any name.
        annotation: The annotation of the first parameter, as it is written.
    """

    positional: tuple[str, ...]
    names: frozenset[str]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    any_number: bool = False
    any_name: bool = False
    annotation: str = ""

    def by_keyword(self, keys: Sequence[str]) -> bool:
        """Whether a dict with these keys can go in by keywords."""
        known = self.any_name or self.names.issuperset(keys)
        return known and set(keys).issuperset(self.required)

    def by_position(self, count: int) -> bool:
        """Whether so many tensors can go in by position."""
        return len(self.required) <= count and (self.any_number or count <= len(self.positional))

    def in_order(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a dict in the order of the parameters, and others by their names."""
        known = [name for name in self.positional if name in entries]
        others = sorted((name for name in entries if name not in known), key=str)
        return {name: entries[name] for name in (*known, *others)}

    def one_argument(self, entries: Mapping[str, Any]) -> Any:
        """What a network with one required parameter gets, none of whose names is a key.

        That is the entry of a usual name, or all of them; ``None`` where only a tensor would do.
        """
        usual = next((key for key in INPUT_KEYS if key in entries), None)
        wants = self.annotation.lower()
        if usual is not None and not any(w in wants for w in ("mapping", "dict", "encoding")):
            return entries[usual]
        return dict(entries) if "tensor" not in wants and entries else None

    def __str__(self) -> str:
        names = [f"{name}=None" if name in self.optional else name for name in self.positional]
        names += sorted(self.names.difference(self.positional))
        more = [*(["*"] if self.any_number else []), *(["**"] if self.any_name else [])]
        return ", ".join([*names, *more])


def _taken_by(kind: type[nn.Module]) -> Taken:
    """What networks of this class take."""
    _, *parameters = inspect.signature(kind.forward).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional = [p for p in parameters if p.kind in by_position]
    first = positional[0].annotation if positional else ""
    return Taken(
        positional=tuple(p.name for p in positional),
        names=frozenset(p.name for p in parameters if p.kind in by_name),
        required=tuple(p.name for p in positional if p.default is inspect.Parameter.empty),
        optional=tuple(p.name for p in positional if p.default is None),
        any_number=any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters),
        any_name=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        annotation="" if first is inspect.Parameter.empty else str(first),
    )


taken_by: Callable[[type[nn.Module]], Taken] = lru_cache(maxsize=256)(_taken_by)  # type: ignore[assignment]

# A network of which nothing is known is taken to want one tensor.
_ONE = Taken(("x",), frozenset(), ("x",), annotation="Tensor")


def taken_of(network: nn.Module | None) -> Taken:
    """What a network takes; a sequence takes whatever its first module takes."""
    while isinstance(network, nn.Sequential) and len(network):
        if type(network).forward is not nn.Sequential.forward:
            break
        network = network[0]
    return _ONE if network is None else taken_by(type(network))


def arguments(network: nn.Module, x: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that the network is called with.

    Raises:
        TypeError: The keys of a dict are not parameters of the network.
    """
    if isinstance(x, Tensor):
        return (x,), {}
    if isinstance(x, tuple):
        return x, {}
    taken = taken_by(type(network))
    if taken.by_keyword(list(x)):
        return (), dict(x)
    if len(taken.required) == 1:
        whole = taken.one_argument(x)
        return (dict(x) if whole is None else whole,), {}
    raise TypeError(
        f"the batch has the keys {list(x)} and the forward of {type(network).__name__} takes "
        f"({taken}); leave out entries that it does not take, and name the others as it does"
    )


def gathered(network: nn.Module, x: Any, others: Sequence[Any], named: Mapping[str, Any]) -> Batch:
    """The batch that is meant by a call like the network's own, ``model(a, b)`` or ``model(a=a)``.

    Raises:
        TypeError: Something is no tensor, or no parameter of the network.
    """
    taken = taken_by(type(network))
    positional = [part for part in (x, *others) if part is not None]
    wrong = [name for name in named if not (taken.any_name or name in taken.names)]
    wrong += [name for name, part in named.items() if not isinstance(part, Tensor)]
    if wrong or not all(isinstance(part, Tensor) for part in positional):
        what = f"by the names {sorted(set(wrong))}" if wrong else "by position"
        raise TypeError(
            f"a call got something {what} that is neither an option of the model nor a tensor for "
            f"the network, whose forward takes ({taken}). Pass tensors, or one dict: "
            "model({'name': tensor, ...})"
        )
    if not named and positional:
        return tuple(positional)
    if not positional and not named:
        raise TypeError(f"a call got no input; the network's forward takes ({taken})")
    return {**dict(zip(taken.positional, positional, strict=False)), **named}


def run(network: nn.Module, x: Batch) -> Any:
    """What the network returns for a batch."""
    if isinstance(x, Tensor):
        return network(x)
    positional, keywords = arguments(network, x)
    return network(*positional, **keywords)


# -- parts ---------------------------------------------------------------------------------------


def mapped(x: Batch, change: Callable[[Tensor], Any]) -> Any:
    """A batch of the same form with every part changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {name: change(part) for name, part in x.items()}
    return tuple(change(part) for part in x)


def copied(x: Batch) -> Batch:
    """A copy, which the network may change in place."""
    return mapped(x, Tensor.clone)  # type: ignore[no-any-return]


def named(network: nn.Module, x: Batch) -> dict[str, Tensor]:
    """The parts by name: those of a tuple are called like the parameters, one tensor like nothing.

    Whatever the order of a dict, its parts come in the order of the parameters, and others by their
    names, so that the same numbers stand side by side in :func:`measured`.

    Raises:
        TypeError: Something is no tensor.
        ValueError: The batch is empty.
    """
    if isinstance(x, Tensor):
        return {"": x}
    refuse_packed(x)
    taken = taken_by(type(network))
    if isinstance(x, Mapping):
        parts = taken.in_order(x)
    elif isinstance(x, tuple):
        known = taken.positional
        parts = {known[i] if i < len(known) else str(i): part for i, part in enumerate(x)}
    else:
        raise TypeError(
            f"the input is a {type(x).__name__}; expected a tensor, a dict of tensors or a tuple "
            "of tensors. model.predict takes frames, arrays and loaders"
        )
    for name, part in parts.items():
        refuse_packed(part)
        if not isinstance(part, Tensor):
            raise TypeError(
                f"the part '{name}' of the input is a {type(part).__name__}; expected a tensor"
            )
    if not parts:
        raise ValueError("the input is empty; expected at least one tensor")
    return parts


def refuse_packed(x: Any) -> None:
    """Refuse tensors that are not there number by number.

    Raises:
        TypeError: The message names the form and what to give instead.
    """
    if isinstance(x, PackedSequence):
        raise TypeError(
            "the input is a PackedSequence, which has no row for each example; give the network a "
            "forward(padded, lengths) that packs inside, with pack_padded_sequence(padded, "
            "lengths.cpu(), batch_first=True, enforce_sorted=False), and pass (padded, lengths)"
        )
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError("the input is a nested tensor; pass x.to_padded_tensor(0.0), and a mask")
    if (isinstance(x, Tensor) and x.layout is not torch.strided) or hasattr(x, "nnz"):
        dense = "x.to_dense()" if isinstance(x, Tensor) else "x.toarray()"
        raise TypeError(
            f"the input is sparse ({type(x).__name__}); pass {dense}, and if it is too large for "
            "memory, a loader whose batches are made dense one by one"
        )


def first_part(x: Batch) -> Tensor:
    """Any of its tensors, which all have the same rows on the same device."""
    if isinstance(x, Tensor):
        return x
    return next(iter(x.values())) if isinstance(x, Mapping) else x[0]


def rows_of(x: Batch) -> int:
    """The number of examples."""
    return first_part(x).shape[0]


# -- what is measured ----------------------------------------------------------------------------


def numbers(network: nn.Module, x: Batch) -> dict[str, Tensor]:
    """The parts of real numbers that are no masks, by name: what is measured of the input."""
    parts = named(network, x)
    return {
        name: part for name, part in parts.items() if part.is_floating_point() and not is_mask(name)
    }


def unmasked(network: nn.Module, x: Batch) -> Mask | None:
    """The mask that says which positions of its sequences count, if the batch has one."""
    return None if isinstance(x, Tensor) else mask_of(named(network, x))


def measured(network: nn.Module, x: Batch) -> Tensor:
    """The input as one tensor: its one part of real numbers, or several side by side, ``(B, N)``.

    Sequences with a mask are averaged over the positions that count.
    """
    if isinstance(x, Tensor):
        return x
    mask = unmasked(network, x)
    parts = [
        mask.mean(part.transpose(1, 2)) if _masked(part, mask) else part  # type: ignore[union-attr]
        for part in numbers(network, x).values()
    ]
    if len(parts) == 1 and parts[0].dim() > 1:
        return parts[0]
    return torch.cat([_flat(part) for part in parts], 1)


def _masked(part: Tensor, mask: Mask | None) -> bool:
    """Whether a part ``(B, T, ...)`` is a sequence of the mask's length."""
    return mask is not None and part.dim() == 3 and mask.fits(part.transpose(1, 2))


def _flat(part: Tensor) -> Tensor:
    """Its rows as vectors, ``(B, N)``; there may be one number in each."""
    return part[:, None] if part.dim() == 1 else part.flatten(1)


def vectors(h: Tensor) -> Tensor:
    """What a module that stands in for the input gave, averaged over positions, ``(B, D)``."""
    return pooled(h).to(h.dtype) if h.dim() > 2 else h


def largest(network: nn.Module, x: Batch) -> Tensor:
    """The largest size of a real number in each row, ``(B,)`` in float64; zero without any.

    It is NaN where the row holds one.
    """
    like = first_part(x)
    found = torch.zeros(like.shape[0], dtype=torch.float64, device=like.device)
    for part in numbers(network, x).values():
        found = found + _flat(part.detach()).abs().amax(1).double()
    return found


def zeroed(network: nn.Module, x: Batch, keep: Tensor) -> Batch:
    """A copy whose real numbers are zero in all rows but those to ``keep``, ``(B,)``."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return torch.where(keep.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)
    real = {id(part) for part in numbers(network, x).values()}

    def change(part: Tensor) -> Tensor:
        if id(part) not in real:
            return part.clone()
        return torch.where(keep.reshape(-1, *[1] * (part.dim() - 1)), part, 0.0)

    return mapped(x, change)  # type: ignore[no-any-return]


def dtype_of(network: nn.Module, x: Batch) -> torch.dtype:
    """The dtype of answers: that of the real numbers of the input, else that of the network."""
    candidates = [*numbers(network, x).values(), *network.parameters(), *network.buffers()]
    found = (tensor.dtype for tensor in candidates if tensor.is_floating_point())
    return next(found, torch.get_default_dtype())


def shape_to_json(shape: Shape) -> Any:
    """The shape of one input as lists."""
    if isinstance(shape, torch.Size):
        return list(shape)
    return {name: list(sizes) for name, sizes in shape.items()}


def shape_from_json(shape: Any) -> Shape:
    """The inverse of :func:`shape_to_json`."""
    if isinstance(shape, list):
        return torch.Size(shape)
    return {name: tuple(sizes) for name, sizes in shape.items()}


def shape_of(network: nn.Module, x: Batch) -> Shape:
    """The shape of one input; see :data:`Shape`."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.shape[1:]
    mask = unmasked(network, x)
    return {
        name: (None, *part.shape[2:]) if _masked(part, mask) else tuple(part.shape[1:])
        for name, part in numbers(network, x).items()
    }
