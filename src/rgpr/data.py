"""Inputs: what comes out of a loader, and whether a network can take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

from .distributed import active

__all__ = [
    "Reservoir",
    "check_batch",
    "check_input",
    "check_logits",
    "check_n_samples",
    "check_rows",
    "check_target",
    "inputs",
    "inputs_and_targets",
    "labelled",
    "network_dtype_device",
    "not_finite",
    "on_device",
    "one_of",
    "row_keys",
]

# On a GPU, where sorting is mostly waiting, so many times the rows are gathered before it.
_LAZY = 4
# Words of a row that have a factor of their own each in its key.
_KEYED = 128
_ODD = 0x5851F42D4C957F2D
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TARGET_KEYS = ("y", "label", "labels", "target", "targets")
_INPUT_KEYS = ("x", "input", "inputs", "image", "images", "pixel_values", "features", "data")


def inputs(loader: Iterable[Any], *, progress: bool, description: str) -> Iterator[Tensor]:
    """The input tensor of every batch, from a loader of ``(x, ...)``, ``x`` or dicts.

    Raises:
        TypeError: A batch holds no tensor where the input is expected.
        KeyError: A dict has none of the usual names of an input.
        ValueError: The loader has no batch at all.
    """
    for batch in _batches(loader, progress=progress, description=description):
        yield _input_of(batch)


def _batches(loader: Iterable[Any], *, progress: bool, description: str) -> Iterator[Any]:
    if isinstance(loader, Tensor | Dataset):
        raise TypeError(
            f"this is a {type(loader).__name__}, which yields single examples; pass a DataLoader "
            "of it, or [x] for one batch x"
        )
    empty = True
    # `disable=None` hides the bar where nobody watches: no terminal, no bar.
    for batch in tqdm(loader, desc=description, leave=False, disable=None if progress else True):
        empty = False
        yield batch
    if empty and not active():  # one of several shards may be empty
        raise ValueError(
            "the loader gave no batch; is it empty, or an iterator that was used up before?"
        )


def labelled(
    loader: Iterable[Any], *, progress: bool, description: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every batch, from a loader of ``(x, y)`` or dicts.

    Raises:
        TypeError: A batch has no targets.
        ValueError: The loader has no batch at all.
    """
    pairs = inputs_and_targets(loader, progress=progress, description=description)
    for x, target in pairs:
        if target is None:
            raise TypeError(
                "a batch has no targets, and they are needed here; yield (x, y), or dicts with "
                "the target under one of: " + ", ".join(_TARGET_KEYS)
            )
        yield x, target


def inputs_and_targets(
    loader: Iterable[Any], *, progress: bool, description: str
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs of every batch, and its targets where it has any."""
    for batch in _batches(loader, progress=progress, description=description):
        target: Any = None
        if isinstance(batch, Mapping):
            target = next((batch[key] for key in _TARGET_KEYS if key in batch), None)
        elif isinstance(batch, list | tuple) and len(batch) > 1:
            target = batch[1]
        yield _input_of(batch), target if isinstance(target, Tensor) else None


def _input_of(batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        for key in _INPUT_KEYS:
            if key in batch:
                batch = batch[key]
                break
        else:
            raise KeyError(
                f"a batch has the keys {sorted(map(str, batch))}, and none of them is a usual "
                f"name of an input ({', '.join(_INPUT_KEYS)}); yield (x, y) pairs instead"
            )
    elif isinstance(batch, list | tuple) and len(batch) > 0:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise TypeError(
            f"a batch gives {type(batch).__name__} where a tensor of inputs was expected; "
            "loaders yield (x, y), x alone, or a dict with the input under one of: "
            + ", ".join(_INPUT_KEYS)
        )
    return batch


class Reservoir:
    """An even sample of at most ``size`` rows of a stream, the same however the stream is cut.

    Every row has a key made from the bits of its input, as good as random; those with the smallest
    keys are kept. So neither the size nor the order of batches matters, nor which of several
    processes saw a row; only of rows with the same key, as equal inputs have, the first are taken.

    Args:
        size: The most rows that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self._parts: list[tuple[Tensor, ...]] = []
        self._waiting = 0

    def add(self, x: Tensor, *rows: Tensor) -> None:
        """Take in a batch: inputs ``(B, ...)``, and what is kept of each (by default itself)."""
        self._extend(row_keys(x), *(rows or (x,)), seen=len(x))

    def merge(self, state: Any) -> None:
        """Take in what another one kept; see :attr:`state`."""
        seen, rows = state
        if rows:
            self._extend(*rows, seen=seen)

    @property
    def state(self) -> tuple[int, tuple[Tensor, ...]]:
        """How many rows were seen, and the keys and rows that were kept."""
        self._settle()
        return self.seen, self._parts[0] if self._parts else ()

    @property
    def items(self) -> tuple[Tensor, ...]:
        """The rows that were kept, of each tensor, in the order of their keys."""
        return self.state[1][1:]

    def _extend(self, keys: Tensor, *rows: Tensor, seen: int) -> None:
        self.seen += seen
        full = bool(self._parts) and len(self._parts[0][0]) == self.size
        if full and not keys.is_cuda:  # where to ask how many are left would mean to wait
            # Once it is full, few rows of a batch get in.
            chosen = _mixed(keys) < _mixed(self._parts[0][0][-1])
            keys, rows = keys[chosen], tuple(t[chosen] for t in rows)
        if len(keys):
            self._parts.append((keys, *(t.clone() for t in rows)))
            self._waiting += len(keys)
        if self._waiting >= self.size * (_LAZY if keys.is_cuda else 1):
            self._settle()

    def _settle(self) -> None:
        if self._waiting:
            merged = [torch.cat(column) for column in zip(*self._parts, strict=True)]
            kept = _mixed(merged[0]).argsort(stable=True)[: self.size]
            self._parts, self._waiting = [tuple(t[kept] for t in merged)], 0


def row_keys(x: Tensor) -> Tensor:
    """A number for each row that depends on its bits alone; :func:`_mixed` makes it random."""
    words = _words(x.detach().flatten(1))
    if words.shape[1] > _KEYED:
        # Sums along both sides of a table tell where a word was: adding is fast.
        missing = -words.shape[1] % _KEYED
        padded = nn.functional.pad(words, (0, missing)) if missing else words
        table = padded.view(len(padded), padded.shape[1] // _KEYED, _KEYED)
        words = torch.cat([table.sum(1), table.sum(2)], 1)
    # Round numbers end in zeros, which a product keeps: what is above them counts below, too.
    words = words ^ (words >> 29)
    return (words * _factors(words.shape[1], words.device)).sum(1)


def _mixed(keys: Tensor) -> Tensor:
    """As good as random: a product mixes all bits into the leading ones, so once more."""
    return (keys ^ ((keys >> 32) & 0xFFFFFFFF)) * _ODD


def _words(flat: Tensor) -> Tensor:
    """The bits of rows ``(B, N)`` as numbers of 64 bits, several entries in each where it fits."""
    size = flat.element_size()
    if size * flat.shape[1] % 8:
        return flat.contiguous().view(_INTEGERS[size]).long()
    # In one line: a single row may have any stride and count as contiguous.
    line = flat.contiguous().view(-1)
    line = line.clone() if line.storage_offset() * size % 8 else line
    return line.view(torch.int64).view(len(flat), size * flat.shape[1] // 8)


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    """Random odd numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
    return (factors * 2 + 1).to(device)


def network_dtype_device(network: nn.Module) -> tuple[torch.dtype | None, torch.device | None]:
    """What the network computes in; ``(None, None)`` for one without floating-point tensors."""
    for tensor in chain(network.parameters(), network.buffers()):  # usually the very first
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return None, None


def on_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on a network's device, if that has one.

    What goes to a GPU is not waited for, or it would have to finish all its work first. So pinned
    memory, once handed out, must not be written to again; torch's loaders never do.
    """
    if device is None:
        return tensor
    return tensor.to(device, non_blocking=device.type == "cuda" and not tensor.is_cuda)


def check_input(x: Tensor, network: nn.Module, shape: torch.Size | None) -> None:
    """Refuse an input that the network cannot take or that differs from the training inputs.

    Args:
        x: A batch.
        network: The network it goes into.
        shape: Shape of one training input, or ``None`` before the fit.

    Raises:
        TypeError: Not a floating-point tensor, or not of the network's dtype.
        ValueError: On another device, without a batch dimension, or of another shape.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the input is a {type(x).__name__}; expected a tensor")
    if not x.is_floating_point():
        raise TypeError(
            f"the input has dtype {x.dtype}; the residual measures distances, so it takes "
            "floating-point inputs. Convert as in training, e.g. x.float() / 255"
        )
    if x.dim() < 2:
        raise ValueError(
            f"the input has shape {tuple(x.shape)}; expected a batch, (B, ...). "
            "For a single example use x[None]"
        )
    dtype, device = network_dtype_device(network)
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"the input has dtype {x.dtype} but the network computes in {dtype}; "
            f"use x.to({dtype}) or cast the network"
        )
    if device is not None and x.device != device:
        raise ValueError(f"the input is on {x.device} but the network is on {device}; move one")
    if shape is not None and x.shape[1:] != shape:
        raise ValueError(
            f"one input has shape {tuple(x.shape[1:])}, but the model was fitted on inputs of "
            f"shape {tuple(shape)}; the moments of one do not apply to the other"
        )


def check_batch(
    number: int, x: Tensor, network: nn.Module, shape: torch.Size | None, *, values: bool = True
) -> None:
    """:func:`check_input` for a batch of training data, which must also be finite.

    Looking at ``values`` waits for a GPU; whoever notices them otherwise need not.
    """
    try:
        check_input(x, network, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batch {number}: {error}") from None
    if values and not bool(x.isfinite().all()):
        raise not_finite(f"batch {number}")


def not_finite(which: str) -> ValueError:
    """The error for a batch of training data with such values."""
    return ValueError(
        f"{which} holds values that are not finite (NaN or inf); the moments of the "
        "training data would be lost. Remove these examples"
    )


def check_rows(layer: str, h: Tensor, x: Tensor) -> None:
    """Refuse a representation whose first dimension is not the batch."""
    if h.shape[0] != x.shape[0]:
        raise ValueError(
            f"layer '{layer}' gives shape {tuple(h.shape)} for a batch of {x.shape[0]}; expected "
            "(B, ...) with the batch first. Choose other layers"
        )


def check_logits(output: Any) -> None:
    """Refuse a network that ends in a softmax: squashing twice would pass unnoticed."""
    if isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 1:
        distributions = (output >= 0).all() & ((output.sum(1) - 1).abs() < 1e-4).all()
        if bool(distributions):
            raise ValueError(
                "the network returns probabilities (each row sums to 1); the residual works on "
                "logits. Leave out the final softmax"
            )


def check_target(target: Tensor, outputs: Tensor, likelihood: str, number: int) -> Tensor:
    """Class indices ``(B,)`` or values ``(B, C)``, whatever harmless form they came in.

    Raises:
        ValueError: They do not fit the outputs; the message names the batch.
    """
    flat = target.reshape(len(target), -1)
    columns = 1 if likelihood == "classification" else outputs.shape[-1]
    if flat.shape != (len(outputs), columns):
        wanted = "class indices (B,)" if likelihood == "classification" else f"(B, {columns})"
        raise ValueError(
            f"batch {number} has targets of shape {tuple(target.shape)} for {len(outputs)} inputs; "
            f"expected {wanted}"
        )
    if likelihood == "regression":
        if not bool(flat.isfinite().all()):
            raise ValueError(f"batch {number} has targets that are not finite; remove them")
        return flat.double()
    classes = max(2, outputs.shape[-1])
    if flat.is_floating_point() or bool(((flat < 0) | (flat >= classes)).any()):
        raise ValueError(
            f"batch {number} has targets of {target.dtype} from {flat.min().item()} to "
            f"{flat.max().item()}; expected whole numbers from 0 to {classes - 1}, one a class"
        )
    return flat[:, 0].long()


def check_n_samples(n_samples: int) -> None:
    """Refuse anything but a positive whole number."""
    if not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples = {n_samples} must be a whole number, at least 1")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value, refused by name unless it is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
    return value
