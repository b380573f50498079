"""Batches from whatever form the data have: arrays, frames, pairs, columns, data sets, loaders.

=======================================  =========================================================
data                                     what is read
=======================================  =========================================================
tensor, numpy array, pandas frame        inputs, one for each row
a tuple of two of them, ``(X, y)``       inputs and targets
dict of arrays, Hugging Face `Dataset`   dicts of columns under their names
torch `Dataset`                          what a ``DataLoader`` of it gives
any other iterable, such as a list       batches, as they come
=======================================  =========================================================

Floating-point numbers of numpy and pandas take the network's dtype, since theirs is float64 whether
anybody chose it or not. Tensors stay as they are: their dtype was chosen. A frame is a table of
numbers, so its whole numbers become floating point as well; an array of whole numbers may be an
image or words, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .._backend.precision import at_least_float32
from .checks import network_dtype_device

__all__ = ["Batches", "as_batches", "check_columns", "check_read_again"]

# The fixed cost of a call, about a millisecond, is then small beside its work.
_MOST_ROWS = 1024
# Numbers in a batch, 16 MiB in float32: 27 images of 224 x 224, a size that networks are trained
# with. Larger ones would be no faster, and might not fit a GPU.
_MOST_NUMBERS = 1 << 22
_NUMERIC = "biuf"


class Batches:
    """Rows that are at hand, cut into batches; they can be read any number of times.

    Args:
        rows: How many there are.
        cut: Gives the batch of a slice of rows.
        columns: Names of a frame's columns.
        index: A frame's index.

    Attributes:
        dataset: Something as long as there are rows, where laplace-torch looks for their number.
    """

    def __init__(
        self,
        rows: int,
        cut: Callable[[slice], Any],
        columns: tuple[str, ...] | None = None,
        index: Any = None,
    ) -> None:
        self.dataset, self._cut, self.columns, self.index = range(rows), cut, columns, index
        self._size = _batch_size(cut(slice(0, 1)))

    def __len__(self) -> int:
        return max(1, -(-len(self.dataset) // self._size))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):  # one empty batch if there is no row: it has a shape
            yield self._cut(slice(number * self._size, (number + 1) * self._size))


def as_batches(source: Any, network: nn.Module | None = None) -> Iterable[Any]:
    """An iterable of batches from data in any of the forms above.

    Args:
        source: The data.
        network: What they are for; numpy's floating-point numbers take its dtype, or torch's
            default without it.

    Raises:
        TypeError: A frame has columns that are no numbers, an array holds something else, or the
            data are streams of single examples.
        ValueError: Inputs and targets, or columns, differ in length.
    """
    if isinstance(source, Batches | DataLoader | list):
        return source
    floats = None if network is None else network_dtype_device(network)[0]
    floats = torch.get_default_dtype() if floats is None else floats
    if _is_array(source):
        return _arrays(source, None, floats)
    if isinstance(source, tuple) and len(source) == 2 and _is_array(source[0]):
        x, y = source
        # A list of numbers is no batch of its own.
        if y is None or _is_array(y) or (isinstance(y, list) and len(y) == len(x)):
            return _arrays(x, y, floats)
    if isinstance(source, Mapping):
        return _mapping(source, floats)
    if hasattr(source, "column_names") and hasattr(source, "num_rows"):  # Hugging Face
        return Batches(len(source), lambda rows: _columns(source[rows], floats))
    if isinstance(source, IterableDataset):
        raise TypeError(
            f"this is a {type(source).__name__}, which yields single examples or batches, who "
            "knows; pass a DataLoader of it"
        )
    if isinstance(source, Dataset):
        size = _batch_size(source[0]) if len(source) else 1  # type: ignore[arg-type]
        return DataLoader(source, batch_size=size)
    if not isinstance(source, Iterable) or isinstance(source, str | bytes):
        raise TypeError(
            f"this is a {type(source).__name__}; expected arrays (X, y), a data set, or a loader, "
            "which yields batches"
        )
    return source


def check_columns(data: Iterable[Any], fitted: Sequence[str] | None) -> None:
    """Refuse a frame whose columns are not those of the frame that the model was fitted on.

    Raises:
        ValueError: The message names the columns that differ.
    """
    columns = getattr(data, "columns", None)
    if fitted is None or columns is None or tuple(columns) == tuple(fitted):
        return
    lacking = [name for name in fitted if name not in columns]
    new = [name for name in columns if name not in fitted]
    if lacking or new:
        differ = f"it lacks {lacking} and has {new} besides"
    else:
        differ = f"they are in another order, {list(columns)}"
    raise ValueError(
        f"the frame's columns are not those that the model was fitted on: {differ}. Pass "
        f"frame[{list(fitted)}]"
    )


def check_read_again(source: Any, what: str) -> None:
    """Refuse an iterator where data are read more than once.

    Args:
        source: The data.
        what: What reads them more than once, as the start of the message.

    Raises:
        TypeError: It can be read once only.
    """
    if isinstance(source, Iterator):
        raise TypeError(
            f"{what} reads the data more than once, and a {type(source).__name__} can be read only "
            "once; pass a DataLoader, arrays, or list(batches)"
        )


# -- arrays and frames -----------------------------------------------------------------------------


def _is_array(source: Any) -> bool:
    if isinstance(source, Tensor | np.ndarray):
        return True
    # pandas, by what it has, so that it need not be imported; files such as HDF5's, likewise.
    return hasattr(source, "iloc") or (hasattr(source, "__array__") and hasattr(source, "shape"))


def _arrays(x: Any, y: Any, floats: torch.dtype) -> Batches:
    columns = _frame_columns(x)
    if y is not None and len(x) != len(y):
        raise ValueError(
            f"X has {len(x)} rows and y has {len(y)}; a tuple is a pair of inputs and targets. "
            "For two batches of inputs pass a list"
        )
    _frame_columns(y)
    y = np.asarray(y) if isinstance(y, list) else y

    def cut(rows: slice) -> Any:
        inputs = _tensor(x, rows, floats, whole=columns is not None)
        if y is None:
            return inputs
        return inputs, _target(y, rows, floats)

    return Batches(len(x), cut, columns, getattr(x, "index", None))


def _frame_columns(source: Any) -> tuple[str, ...] | None:
    """The names of a frame's columns, all of which must be numbers; ``None`` for an array."""
    if not (hasattr(source, "iloc") and hasattr(source, "columns")):
        return None
    kinds = [(str(name), dtype) for name, dtype in source.dtypes.items()]
    others = [f"'{n}' ({d})" for n, d in kinds if getattr(d, "kind", "O") not in _NUMERIC]
    if others:
        raise TypeError(
            f"these columns of the frame are no numbers: {', '.join(others)}; encode them as the "
            "network was trained, or drop them"
        )
    return tuple(name for name, _ in kinds)


def _tensor(source: Any, rows: slice, floats: torch.dtype, *, whole: bool = False) -> Tensor:
    """Some rows as a tensor.

    Args:
        source: An array or a frame.
        rows: Which.
        floats: The dtype of floating-point numbers that come from numpy.
        whole: Whether whole numbers become floating point, too.
    """
    if isinstance(source, Tensor):
        return source[rows]
    if hasattr(source, "iloc"):
        part = source.iloc[rows]
        missing = whole or getattr(part.dtype, "kind", "O") == "f"
        # What pandas calls missing becomes NaN.
        part = part.to_numpy(dtype="float64", na_value=np.nan) if missing else part.to_numpy()
    else:
        part = np.asarray(source[rows])
    if part.dtype.kind not in _NUMERIC:
        raise TypeError(
            f"the array holds {part.dtype}, no numbers; encode them as the network was trained"
        )
    # In memory of its own: torch takes neither backward strides nor another machine's bytes.
    tensor = torch.from_numpy(part.astype(part.dtype.newbyteorder("="), order="C"))
    return tensor.to(floats) if tensor.is_floating_point() else tensor


def _target(source: Any, rows: slice, floats: torch.dtype) -> Tensor:
    """Some targets as a tensor: whole numbers as class indices."""
    if isinstance(source, Tensor):
        return source[rows]
    if hasattr(source, "columns"):
        source = source.to_numpy()
    target = _tensor(source, rows, at_least_float32(floats))
    return target if target.is_floating_point() else target.long()


# -- columns ---------------------------------------------------------------------------------------


def _mapping(source: Mapping[Any, Any], floats: torch.dtype) -> Batches:
    columns = {k: v for k, v in source.items() if _is_array(v) or isinstance(v, list)}
    if len(columns) < len(source) or not columns:
        raise TypeError(
            f"this is a {type(source).__name__} of {sorted(map(str, source))}, not all of which "
            "are arrays; if they are splits, pass one of them"
        )
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns differ in length: {lengths}; each row is one example")
    rows = next(iter(lengths.values()))
    return Batches(rows, lambda part: _columns({k: v[part] for k, v in columns.items()}, floats))


def _columns(batch: Mapping[Any, Any], floats: torch.dtype) -> dict[Any, Any]:
    """A batch of columns, as tensors where they are numbers; others, such as texts, stay."""
    found = dict(batch)
    for name, column in batch.items():
        if isinstance(column, Tensor):
            continue
        try:
            array = np.asarray(column)
        except ValueError:  # rows of differing lengths
            continue
        if array.dtype.kind in _NUMERIC:
            # What has one number a row are targets, which keep their digits.
            dtype = at_least_float32(floats) if array.ndim == 1 else floats
            found[name] = _tensor(array, slice(None), dtype)
    return found


def _batch_size(example: Any) -> int:
    """How many rows go into a batch, given one."""
    return max(1, min(_MOST_ROWS, _MOST_NUMBERS // max(1, _numbers(example))))


def _numbers(example: Any) -> int:
    """How many numbers there are in the largest tensor of an example."""
    if isinstance(example, Mapping):
        example = list(example.values())
    if isinstance(example, list | tuple):
        return max(map(_numbers, example), default=0)
    # One of no rows says how large a row would be.
    return int(np.prod([max(1, size) for size in getattr(example, "shape", ())]))
