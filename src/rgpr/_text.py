"""Words for people: tables as plain text, lists of names that stay short, what an error says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = ["MOST", "aligned", "listed", "meant", "said"]

# A list of more names than MOST is cut to its first _SHOWN.
MOST, _SHOWN = 8, 3


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def listed(names: Iterable[str]) -> str:
    """Names with commas between them; of more than eight the first three and how many follow.

    Example:
        >>> listed(["a", "b"])
        'a, b'
        >>> listed(f"p{number}" for number in range(59))
        'p0, p1, p2, … and 56 more'
    """
    names = list(names)
    if len(names) <= MOST:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])}, … and {len(names) - _SHOWN} more"


def meant(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` if one of the known names is close to this one, else nothing.

    Example:
        >>> meant("Speces", ["width", "species"])
        ", did you mean 'species'?"
        >>> meant("colour", ["width", "species"])
        ''
    """
    by_lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return f", did you mean '{by_lower[close[0]]}'?" if close else ""


def said(error: Exception) -> str:
    """What an error says. Python would show a :class:`KeyError` with quotes around it."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
