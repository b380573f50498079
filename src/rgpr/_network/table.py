"""A table of a network's layers: which would be read, how, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._text import aligned
from .representation import INPUT, Representation
from .trace import Call, Side, Trace

__all__ = ["LayerRow", "LayerTable", "table_of"]


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        name: What ``layers=`` calls it.
        kind: The class of the module.
        shape: Shape of what it makes, with ``"B"`` for the batch.
        axis: The axis of the channels, or ``None`` where there is no representation.
        taken: Whether it is read.
        why: The reason, and which position of a sequence is read.
    """

    name: str
    kind: str
    shape: tuple[int | str, ...]
    axis: int | None
    taken: bool
    why: str

    @property
    def width(self) -> int | None:
        """How many channels it has."""
        size = None if self.axis is None else self.shape[self.axis]
        return size if isinstance(size, int) else None


@dataclass(frozen=True)
class LayerTable:
    """All layers of a network in the order in which they finish, the input first; ``print`` it.

    Attributes:
        rows: The layers.
    """

    rows: Sequence[LayerRow]

    @property
    def taken(self) -> list[str]:
        """Names of the layers that are read."""
        return [row.name for row in self.rows if row.taken]

    def __str__(self) -> str:
        head = ("", "name", "kind", "shape", "channels", "why")
        lines = [head]
        for row in self.rows:
            shape = "(" + ", ".join(map(str, row.shape)) + ")"
            channels = "" if row.axis is None else f"axis {row.axis}: {row.width}"
            lines.append(("*" if row.taken else "", row.name, row.kind, shape, channels, row.why))
        return f"{aligned(lines)}\n* read: {len(self.taken)} of {len(self.rows)}"

    __repr__ = __str__


def table_of(seen: Trace, read: Sequence[Representation]) -> LayerTable:
    """The table of a network that was looked at.

    Args:
        seen: What a run of the network did.
        read: The representations that are read, the input first.
    """
    chosen = {each.name: each for each in read}
    chosen[INPUT] = replace(read[0], channel=None)  # every entry is a unit: no axis is special
    source = read[0].source
    why = "it carries the guarantee" if source is None else f"through '{source}'"
    rows = [_row(INPUT, "", seen.root.given, chosen, f"always read: {why}")]
    _add(seen, seen.root, chosen, "", rows)
    return LayerTable(rows)


def _add(
    seen: Trace, call: Call, chosen: Mapping[str, Representation], inside: str, rows: list[LayerRow]
) -> None:
    """Rows for the runs inside ``call``, which lies inside the layer of that name that is read."""
    for inner in call.calls:
        name, kind = seen.label(inner), type(inner.module).__name__
        goes_in = seen.label(inner, goes_in=True)
        if goes_in in chosen:
            rows.append(_row(goes_in, kind, inner.given, chosen, "read: what goes into it"))
        _add(seen, inner, chosen, name if name in chosen else inside, rows)
        why = "read"
        if name not in chosen:
            below = any(seen.label(each) in chosen for each in _below(inner))
            why = _why_not(inner, inner is seen.head, inside, below)
        rows.append(_row(name, kind, inner.made, chosen, why))


def _why_not(call: Call, head: bool, inside: str, below: bool) -> str:
    if head:
        return "makes the outputs"
    if call.made.problem:
        return call.made.problem
    if inside:
        return f"inside '{inside}'"
    return "layers inside it are read" if below else "not read"


def _below(call: Call) -> list[Call]:
    return [each for inner in call.calls for each in (inner, *_below(inner))]


def _row(
    name: str, kind: str, side: Side, chosen: Mapping[str, Representation], why: str
) -> LayerRow:
    shape: tuple[int | str, ...] = tuple(side.shape)
    if side.problem:
        # The input is read whatever form it has: a network may get it by keywords.
        return LayerRow(name, kind, shape, None, name in chosen, why)
    shape = (*shape[: side.batch], "B", *shape[side.batch + 1 :])
    axis, token = side.axis, None
    if name in chosen:
        channel, token = chosen[name].channel, chosen[name].token
        axis = side.axis if channel is None else channel
    axis = axis % len(shape)
    # Counted in the tensor as it is, where the batch may come second.
    axis -= side.batch if axis == 1 else 0
    place = {0: ", its first position", -1: ", its last position"}.get(token or 0, "")
    return LayerRow(name, kind, shape, axis, name in chosen, why + place * (token is not None))
