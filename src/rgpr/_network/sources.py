"""Batches from whatever form the data have: arrays, frames, pairs, columns, data sets, loaders.

=======================================  =========================================================
data                                     what is read
=======================================  =========================================================
tensor, numpy array, pandas frame        inputs, one for each row
a tuple of them, ``(X, y)``              inputs, as many as the network takes, and targets
``((a, b), y)``, ``(dict, y)``           likewise, with the inputs in a bracket of their own
dict of arrays, Hugging Face `Dataset`   dicts of columns under their names
torch `Dataset`                          what a ``DataLoader`` of it gives
any other iterable, such as a list       batches, as they come; so are tensors of ``x.split(64)``
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
from .batches import refuse_packed, taken_of
from .checks import network_dtype_device
from .targets import check_words, in_array

__all__ = ["Batches", "as_batches", "check_no_pair", "check_read_again"]

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
        cut: See below, as are the others.

    Attributes:
        dataset: Something as long as there are rows, where laplace-torch looks for their number.
        cut: Gives the batch of a slice of rows.
        columns: Names of a frame's columns.
        index: A frame's index.
    """

    def __init__(
        self,
        rows: int,
        cut: Callable[[slice], Any],
        columns: tuple[str, ...] | None = None,
        index: Any = None,
    ) -> None:
        self.dataset, self.cut, self.columns, self.index = range(rows), cut, columns, index
        self._size = _batch_size(cut(slice(0, 1)))

    def __len__(self) -> int:
        return max(1, -(-len(self.dataset) // self._size))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):  # one empty batch if there is no row: it has a shape
            yield self.cut(slice(number * self._size, (number + 1) * self._size))

    def named(self) -> Iterator[tuple[Any, Sequence[str] | None]]:
        """The same batches, with the names of their rows where these have any."""
        return ((batch, None) for batch in self)


def as_batches(source: Any, network: nn.Module | None = None, y: Any = None) -> Iterable[Any]:
    """An iterable of batches from data in any of the forms above.

    Args:
        source: The data.
        network: What they are for; numpy's floating-point numbers take its dtype, or torch's
            default without it.
        y: Targets, if ``source`` is arrays of inputs alone.

    Raises:
        TypeError: A frame has columns that are no numbers, an array holds something else, the
            data are streams of single examples, or targets come beside a loader.
        ValueError: Inputs and targets, or columns, differ in length.
    """
    if y is None and isinstance(source, Batches | DataLoader):
        return source
    floats = None if network is None else network_dtype_device(network)[0]
    floats = torch.get_default_dtype() if floats is None else floats
    inputs = max(1, len(taken_of(network).required))
    if y is not None:  # in a bracket, one array of several is no pair with the targets
        return _together(((source,) if inputs > 1 and _is_array(source) else source, y), 1, floats)
    if isinstance(source, list):
        _check_list(source)
        return source
    refuse_packed(source)
    if _is_array(source):
        return _together((source,), 1, floats)
    if isinstance(source, tuple):
        kinds = {(part.dtype, part.shape[1:]) if isinstance(part, Tensor) else 0 for part in source}
        if len(source) > inputs + 1 and len(kinds) == 1 and 0 not in kinds:
            return list(source)  # what x.split(64) gives
        return _together(source, inputs, floats)
    if isinstance(source, Mapping):
        rows, cut = _mapping(source, floats)
        return Batches(rows, cut)
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
            "which yields batches (fit also takes a FitState, and calibrate a CalibrationState; "
            "from a file: state.add(path))"
        )
    return source


def _check_list(batches: list[Any]) -> None:
    """Refuse what a loader yields in the place of a loader: a list ``[X, Y]`` of two tensors.

    Two tensors of one shape may well be two batches, and so may ids of two lengths.
    """
    if len(batches) != 2 or not all(isinstance(batch, Tensor) and batch.dim() for batch in batches):
        return
    x, y = batches
    like = x.dtype == y.dtype and x.dim() == y.dim()
    if len(x) == len(y) and not (like and (x.shape == y.shape or not x.is_floating_point())):
        raise _pair_in_list(x, y)


def check_no_pair(source: Any, outputs: int) -> None:
    """Refuse two batches of inputs of which the second may as well be the targets of the first.

    Args:
        source: What is read; anything but a list of two such tensors passes.
        outputs: How many numbers the target of one input has.

    Raises:
        TypeError: The message says how to write either.
    """
    if not isinstance(source, list) or [type(batch) for batch in source] != [Tensor] * 2:
        return
    x, y = source
    if x.shape == y.shape and x.shape[1:] == (outputs,):
        raise _pair_in_list(x, y)


def _pair_in_list(x: Tensor, y: Tensor) -> TypeError:
    return TypeError(
        f"a list holds batches, and this one holds two tensors of shapes {tuple(x.shape)} and "
        f"{tuple(y.shape)}, {x.dtype} and {y.dtype}. If these are inputs and their targets, pass "
        "[(X, Y)], or X and Y as two arguments; if both are inputs, pass torch.cat([a, b]) or "
        "[(a, None), (b, None)]"
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


def _together(parts: tuple[Any, ...], inputs: int, floats: torch.dtype) -> Batches:
    """Inputs and targets, cut together.

    Args:
        parts: Arrays, of which the first are inputs and the others targets. The first part may be
            a dict or a tuple of arrays instead: then it is all of the inputs.
        inputs: How many of the parts are inputs, unless the first is all of them.
        floats: The dtype of floating-point numbers that come from numpy.
    """
    first = parts[0] if parts else None
    refuse_packed(first)
    cuts: list[tuple[int, Callable[[slice], Any]]] = []
    if isinstance(first, Mapping):
        cuts, inputs = [_mapping(first, floats)], 1
    elif isinstance(first, tuple) and first and all(map(_is_array, first)):
        bracket = _together((*first, None), len(first), floats)  # a tuple, even of one
        cuts, inputs = [(len(bracket.dataset), bracket.cut)], 1
    for number, part in enumerate(parts[len(cuts) :], start=len(cuts)):
        listed = number and isinstance(part, list | tuple) and not any(map(_has_rows, part))
        if part is None and number >= inputs:
            continue
        if not (_is_array(part) or listed):
            raise _no_pair(parts)
        if number < inputs:
            cuts.append((len(part), _cut_input(part, floats)))
        else:
            cuts.append((len(part), _cut_target(part, floats)))
    rows = [count for count, _ in cuts]
    if len(set(rows)) != 1:
        raise ValueError(
            f"X has {rows[0]} rows and y has {rows[-1]}; a tuple is a pair of inputs and targets. "
            "For two batches of inputs pass a list"
            if len(rows) == 2
            else f"the arrays of the tuple have {rows} rows; each row is one example"
        )
    several = len(parts) > 1

    def cut(part: slice) -> Any:
        found = tuple(one(part) for _, one in cuts)
        return found if several else found[0]

    return Batches(rows[0], cut, _frame_columns(first), _index(first))


def _has_rows(value: Any) -> bool:
    return len(getattr(value, "shape", ())) > 0


def _no_pair(parts: tuple[Any, ...]) -> TypeError:
    """The error for a tuple that is no arrays of inputs and targets."""
    first, kinds = parts[0], ", ".join(type(part).__name__ for part in parts)
    if len(parts) == 2 and not isinstance(first, tuple | Mapping) and not _is_array(first):
        return TypeError(
            f"targets go with arrays of inputs, and here they come with a {type(first).__name__}; "
            "a loader, a data set or a list yields (x, y) itself"
        )
    return TypeError(
        f"this is a tuple ({kinds}); expected arrays of inputs and targets: (X, y), ((a, b), y) or "
        "({'name': a}, y). For batches pass a list or a loader"
    )


def _index(source: Any) -> Any:
    """The index of a frame or a series; ``None`` for anything else."""
    return source.index if hasattr(source, "iloc") else None


def _cut_input(source: Any, floats: torch.dtype) -> Callable[[slice], Tensor]:
    whole = _frame_columns(source) is not None
    return lambda rows: _tensor(source, rows, floats, whole=whole)


def _cut_target(source: Any, floats: torch.dtype) -> Callable[[slice], Tensor]:
    """Some targets as a tensor: whole numbers as class indices, and what is missing as NaN."""
    if isinstance(source, Tensor):
        return lambda rows: source[rows]
    if _frame_columns(source) is None:
        check_words(source)
    if hasattr(source, "iloc"):
        frame, source = source, source.to_numpy()
        if source.dtype.kind == "O":
            source = frame.to_numpy(dtype="float64", na_value=np.nan)
    elif isinstance(source, list | tuple):
        source = in_array(source)

    def cut(rows: slice) -> Tensor:
        target = _tensor(source, rows, at_least_float32(floats))
        return target if target.is_floating_point() else target.long()

    return cut


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


# -- columns ---------------------------------------------------------------------------------------


def _mapping(
    source: Mapping[Any, Any], floats: torch.dtype
) -> tuple[int, Callable[[slice], dict[Any, Any]]]:
    """How many rows the columns have, and what cuts them."""
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
    return rows, lambda part: _columns({k: v[part] for k, v in columns.items()}, floats)


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
