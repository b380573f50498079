"""The table of other forms of the score, and which missed targets one of them would reach."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from .comparison import over_seeds
from .detector_targets import Target, targets
from .score_forms import PRESENT
from .section import Block, Table, Text, spread
from .units import Unit

__all__ = ["forms_of"]

_COLUMNS = (
    ("near AUROC", "near", "auroc"),
    ("far AUROC", "far", "auroc"),
    ("near FPR95", "near", "fpr95"),
    ("far FPR95", "far", "fpr95"),
    ("FPR95 of all sets", "all", "fpr95"),
)


def forms_of(name: str, title: str, units: Sequence[Unit]) -> list[Block]:
    """The table and its sentence for one set; nothing where a unit of before has no forms.

    Args:
        name: The in-distribution set.
        title: Its name in the paper.
        units: Its units.
    """
    listed = units[0].result.get("forms", {})
    shown = [form for form in listed if over_seeds(units, "forms", form, "near")]
    if PRESENT not in shown:
        return []
    rows = []
    for form in shown:
        marked = f"→ {form}" if form == PRESENT else form
        of = partial(over_seeds, units, "forms", form)
        rows.append([marked, *(spread(of(where, m), 1, 100) for _, where, m in _COLUMNS)])
    head = [f"{title}: form", *(heading for heading, _, _ in _COLUMNS)]
    caption = (
        f"{title}: other forms of the score. r is the strangeness and E the evidence; relative adds"
        " half of log(d_c^3 / d^3), with the distances of the last features to the nearest class "
        "mean and to the overall mean. The arrow marks the form that the library has"
    )
    return [Table(head, rows, caption), Text(_sentence(title, units, shown, targets(name, units)))]


def _sentence(title: str, units: Sequence[Unit], forms: list[str], aims: list[Target]) -> str:
    """Which targets the present form misses, and which form would reach each of them."""
    value = partial(_value, units)
    missed = [aim for aim in aims if not aim.reached(value(PRESENT, aim))]
    opening = (
        f"{title}: this table chose nothing; the library's form was fixed before, and a choice "
        "would need data that are in no table."
    )
    if not missed:
        return f"{opening} The library's form misses none of its {len(aims)} targets here."
    sentences = [
        opening,
        f"The library's form misses {len(missed)} of its {len(aims)} targets here.",
    ]
    for aim in missed:
        reaching = [form for form in forms if aim.reached(value(form, aim))]
        named = "; ".join(f"`{form}` ({value(form, aim):.1f} %)" for form in reaching)
        would = f"would be reached by {named}" if reaching else "would be reached by no form"
        sentences.append(f"It has {value(PRESENT, aim):.1f} %; an {aim} {would}.")
    for form in forms:
        if all(aim.reached(value(form, aim)) for aim in aims):
            sentences.append(f"`{form}` would reach all targets of this set.")
    return " ".join(sentences)


def _value(units: Sequence[Unit], form: str, aim: Target) -> float:
    return 100 * float(mean(over_seeds(units, "forms", form, aim.where, aim.metric)))
