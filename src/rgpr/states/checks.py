"""What the parts of a state must be: a file is held to what :meth:`update` could have made.

A checksum finds what happened to a file by accident. These rules find what another program wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._network.batches import shape_from_json
from .._network.checks import network_dtype_device
from .._network.kept import Kept
from .._network.loaders import on_device
from .._network.representation import Representation, names_of
from ..extension import Extension
from ..extension.plan import Plan
from ..extension.statistics import PROBE
from ..residual.recipes import Strategy
from ..saving.checks import ASCENDING, FINITE, NOT_NEGATIVE, Rule, check_layers, check_numbers

__all__ = ["check_calibration", "check_choice", "check_fit"]

_ANY: Rule = ("numbers", lambda t: torch.ones_like(t, dtype=torch.bool))
_NO_NAN: Rule = ("no NaN and not negative", lambda t: t >= 0)
_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Rows by which it is found out which layers a model reads.
_FEW = 16


def check_fit(state: Mapping[str, Any], plan: Plan) -> None:
    """Refuse statistics that no pass over training data gives.

    Args:
        state: What :meth:`rgpr.extension.statistics.Statistics.state` gives.
        plan: What they are for.

    Raises:
        ValueError: The message names the part.
    """
    layers = [Representation(*each) for each in state["layers"]]
    if not layers:
        return
    check_layers(names_of(layers), plan.posterior.network)
    for name in ("largest", "outputs", "classes"):
        _whole(name, state[name], 1)
    if not set(state["labelled"]) <= {False, True}:
        raise ValueError(f"'labelled' is {state['labelled']}")
    seen = _check_kept("probe", state["probe"], PROBE)
    _, *columns, y = state["probe"]["rows"]
    labels: Rule = ("classes or -1", lambda t: (t >= -1) & (t < max(1, state["classes"])))
    check_numbers("probe.labels", y, (len(y),), labels)
    shape = shape_from_json(state["shape"])
    if isinstance(shape, torch.Size) and tuple(columns[0].shape[1:]) != tuple(shape):
        raise ValueError(f"its inputs have shape {tuple(columns[0].shape[1:])}, and not {shape}")
    pairs = zip(state["collectors"], plan.strategies(len(layers)), strict=True)
    for index, (collector, strategy) in enumerate(pairs):
        _check_collector(f"collectors.{index}", collector, strategy, seen)


def check_choice(what: str, state: Mapping[str, Any], plan: Plan) -> None:
    """Refuse statistics of other layers than those that a model reads of the same inputs.

    Args:
        what: The state, in words.
        state: What :meth:`rgpr.extension.statistics.Statistics.state` gives.
        plan: What the model is to be fitted by.

    Raises:
        ValueError: The message says which layers there are.
    """
    if not state["layers"]:
        return
    kept = Kept(state["form"], state["probe"]["rows"][1:-1])
    device = network_dtype_device(plan.posterior.network)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever made the state was warned
        now = plan.choose(on_device(kept.split(_FEW)[1][0], device))
    before = [Representation(*each) for each in state["layers"]]
    if names_of(before) != names_of(now):
        raise ValueError(
            f"{what} is of the layers {names_of(before)}, and this model reads {names_of(now)}; "
            "make the model with the same layers="
        )
    if before != now:
        raise ValueError(f"{what} reads layers as {before}, and this model as {now}")


def check_calibration(state: Mapping[str, Any], extension: Extension, at_most: int) -> None:
    """Refuse examples that no pass over held-out data gives.

    Args:
        state: What :meth:`rgpr.answers.examples.Shard.state` gives.
        extension: The model that they are for.
        at_most: The most examples that are kept.

    Raises:
        ValueError: The message names the part.
    """
    kept = state["kept"]
    seen = 0 if kept is None else _check_kept("examples", kept, at_most)
    if _whole("watched", state["watched"], 0) > seen:
        raise ValueError(f"'watched' is {state['watched']}, of {seen} examples")
    if kept is None:
        return
    _, u, first, second, *target = kept["rows"]
    rows, outputs = len(u), first.shape[-1]
    check_numbers("examples.u", u, (rows, len(extension.layers)), _NO_NAN)
    check_numbers("examples.mean", first, (rows, outputs), FINITE)
    check_numbers("examples.variance", second, (rows, outputs), NOT_NEGATIVE)
    if len(target) > 1:
        raise ValueError(f"its examples have {len(target)} targets each")
    for each in target:
        checked = extension.likelihood.target(each, (rows, outputs), 0)
        check_numbers("examples.target", each, checked.shape, FINITE)


def _check_collector(
    name: str, collector: Mapping[str, Any], strategy: Strategy, seen: int
) -> None:
    """Refuse statistics of a representation that are not of ``seen`` rows."""
    if collector["dtype"] not in _DTYPES:
        raise ValueError(f"'{name}.dtype' is {collector['dtype']}, none of {_DTYPES}")
    if strategy.coordinates == "moments":
        moments = collector["moments"]
        width = moments["near"].numel()
        check_numbers(f"{name}.near", moments["near"], (width,), FINITE)
        check_numbers(f"{name}.sum", moments["sum"], (width,), FINITE)
        check_numbers(f"{name}.squares", moments["squares"], (width,), NOT_NEGATIVE)
        ends = (width if strategy.offset == 1 else 0,)
        for end in ("low", "high"):
            check_numbers(f"{name}.{end}", moments[end], ends, FINITE)
        count, resolution = moments["count"], moments["resolution"]
    else:
        classes, diagonal = collector["classes"], collector["diagonal"]
        width, number = classes["means"].shape[1], _whole(f"{name}.count", collector["count"], 1)
        check_numbers(f"{name}.counts", classes["counts"], (number,), NOT_NEGATIVE)
        check_numbers(f"{name}.means", classes["means"], (number, width), FINITE)
        scatter = (width,) if diagonal is True else (width, width)
        check_numbers(f"{name}.scatter", classes["scatter"], scatter, FINITE)
        count, resolution = float(classes["counts"].sum()), classes["resolution"]
    if count != seen:
        raise ValueError(f"'{name}' is of {count} inputs, and the state has seen {seen}")
    if not 0 < resolution < 1:
        raise ValueError(f"'{name}.resolution' is {resolution}")
    if collector["rows"] is not None:
        _check_kept(f"{name}.rows", collector["rows"], 10_000)


def _check_kept(name: str, kept: Mapping[str, Any], at_most: int) -> int:
    """Refuse a sample whose columns do not fit together; how many rows it was drawn from."""
    size, seen = _whole(f"{name}.size", kept["size"], 1), _whole(f"{name}.seen", kept["seen"], 0)
    rows: Sequence[Tensor] = kept["rows"]
    count = min(size, seen)
    if size > at_most or any(len(column) != count for column in rows):
        lengths = [len(column) for column in rows]
        raise ValueError(f"'{name}' keeps {lengths} rows of {seen}, and {size} at most")
    keys, *columns = rows
    check_numbers(f"{name}.keys", keys.long(), (count,), _ANY)
    for number, column in enumerate(columns):
        finite = column.is_floating_point() and name != "examples"
        rule = FINITE if finite else _ANY
        check_numbers(f"{name}.{number}", column, column.shape, rule)
    history = kept["history"]
    check_numbers(f"{name}.history", history, (len(history),), ASCENDING)
    if {keys.dtype, history.dtype} != {torch.int64} or len(history) > seen:
        raise ValueError(f"'{name}' has keys of {keys.dtype} and a history of {len(history)}")
    return seen


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"'{name}' is {value!r}, and must be a whole number from {least} on")
    return value
