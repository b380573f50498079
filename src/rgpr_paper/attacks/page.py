"""Tables and picture of the attacks, and the shorter tables of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..figures import COLORS, drawing
from ..section import Block, Figure, Section, Table, Text, provenance
from ..units import Unit, read_units
from .claims import claims
from .far import EPS, KINDS
from .numbers import NORM_NAMES, SURE, from_noise, highest_at, label, limit, of_kind, up_to

__all__ = ["render", "summary"]

_DTYPES = ("float32", "float64")


def render(folder: Path) -> Section:
    """What attackers reach from test data, from noise and far away, and the claims."""
    units = read_units(folder)
    section = Section([_figure(folder, units), Text(_HOW)])
    section.add(*(near_table([unit]) for unit in of_kind(units, "near")))
    section.add(*(noise_table([unit]) for unit in of_kind(units, "noise")))
    section.add(far_table(of_kind(units, "far")), beyond_table(of_kind(units, "far")))
    section.claims = claims(units)
    section.add(*provenance(units))
    return section


def summary(folder: Path) -> list[Block]:
    """The tables of the documentation: the network itself, and balls of the largest entry."""
    units = read_units(folder)
    bare = [unit for unit in units if unit.result["posterior"] == "MAP"]
    return [
        near_table(of_kind(bare, "near"), norms=("linf",)),
        noise_table(of_kind(bare, "noise")),
        beyond_table(of_kind(units, "far")),
    ]


_HOW = (
    "An attack is projected gradient ascent on log-odds or on the score, with restarts; the best "
    "point on the way counts. MAP is the network itself, LLL last-layer Laplace; RGPR is the "
    "default residual over it, calibrated on held-out data. Flags are at 5 %. Radii are in units "
    "of the input, whose entries lie between 0 and 1; distances are lengths of (x - mean) / std."
)


def near_table(units: Sequence[Unit], norms: Sequence[str] = tuple(NORM_NAMES)) -> Table:
    """A row for each victim, norm and radius."""
    head = ["from test inputs: ball", "base: fooled, %", "confidence", "of these flagged, %"]
    head += ["RGPR: fooled, %", "confidence", "of these flagged, %"]
    head += ["both: fooled and not flagged, %", "confidence"]
    head += ["flagged inputs made to pass, %", "lowest score"]
    rows = [
        [f"{label(unit)}, {NORM_NAMES[norm]} {radius}", *_near_cells(cell)]
        for unit in units
        for norm in norms
        for radius, cell in unit.result["cells"][norm].items()
    ]
    flag = "; ".join(f"{label(unit)}: {unit.result['threshold']:.2f}" for unit in units)
    starts = ", ".join(
        f"{unit.result['inputs']} inputs and {unit.result['flagged inputs']} flagged ones of "
        f"{label(unit)}"
        for unit in units
    )
    caption = (
        f"Fooled: more than 1/2 for a wrong class. From {starts}, all classified correctly; "
        "confidence is the mean of that in the wrong class. Scores are flagged from about "
        f"{flag} on"
    )
    return Table(head, rows, caption)


def _near_cells(cell: dict[str, float]) -> list[str]:
    found = []
    for name in ("base", "model"):
        share = cell[f"{name}, fooled"]
        flagged = cell[f"{name}, fooled and flagged"]
        found += [f"{100 * share:.0f}", f"{cell[f'{name}, confidence']:.2f}"]
        found.append(f"{100 * flagged / share:.0f}" if share else "-")
    found += [f"{100 * cell['both, fooled']:.0f}", f"{cell['both, confidence']:.2f}"]
    passing, lowest = cell["passing"], cell["lowest score"]
    found.append("-" if passing is None else f"{100 * passing:.0f}")
    return [*found, "-" if lowest is None else f"{lowest:.2f}"]


def noise_table(units: Sequence[Unit]) -> Table:
    """A row for each victim, scale of the noise and share of its distance."""
    head = ["from noise: scale, share of its distance", "base: confidence", "attacked"]
    head += ["RGPR: confidence", "attacked", "the highest", "flagged, %"]
    head += ["flagged after the attacks, %", "highest of an attack on both"]
    rows = []
    for unit in units:
        for (factor, share), cell in sorted(
            from_noise(unit).items(), key=lambda item: tuple(map(float, item[0]))
        ):
            highest = cell["both, highest"]
            rows.append(
                [
                    f"{label(unit)}: {factor} x, {share}",
                    *(f"{cell[f'base, {when}']:.2f}" for when in ("before", "after")),
                    *(f"{cell[f'model, {when}']:.2f}" for when in ("before", "after", "highest")),
                    f"{100 * cell['model, flagged before']:.0f}",
                    f"{100 * cell['flagged after']:.0f}",
                    f"{highest:.2f}" if highest else "all flagged",
                ]
            )
    caption = (
        "Uniform noise between 0 and 1 times the scale, in balls whose radius is that share of "
        "the noise's distance from the training mean; the strongest of three norms"
    )
    return Table(head, rows, caption)


def far_table(units: Sequence[Unit]) -> Table:
    """A row for each victim and kind of start: how far out attacks reach something."""
    head = ["far away: start", f"RGPR above 1/C + {EPS:g} up to", f"above {SURE:g} up to"]
    head += ["not flagged up to", f"not flagged and above {SURE:g} up to", "base, the furthest"]
    rows = [
        [
            f"{label(unit)}: {kind}",
            _distance(up_to(unit, "model", limit(unit), [kind])),
            _distance(up_to(unit, "model", SURE, [kind])),
            _distance(up_to(unit, "unflagged", 0.5, [kind])),
            _distance(up_to(unit, "both", SURE, [kind])),
            f"{unit.result['base'][kind][-1]:.2f}",
        ]
        for unit in units
        for kind in KINDS
    ]
    caption = "The largest distance at which an attack reached it; training data: " + _typical(
        units
    )
    return Table(head, rows, caption)


def _typical(units: Sequence[Unit]) -> str:
    typical = {label(unit).partition(",")[0]: unit.result["typical"] for unit in units}
    return ", ".join(f"{name} about {distance:.3g}" for name, distance in typical.items())


def beyond_table(units: Sequence[Unit]) -> Table:
    """A row for each victim: how far attacks reach, and what the certificate says."""
    head = ["far away", "not flagged up to", f"RGPR above {SURE:g} up to"]
    head += [f"above 1/C + {EPS:g} up to", "certified from"]
    head += [f"inputs tried beyond it, {dtype}: the highest" for dtype in _DTYPES]
    rows = []
    for unit in units:
        tried = [unit.result[f"beyond, {dtype}"] for dtype in _DTYPES]
        rows.append(
            [
                label(unit),
                _distance(up_to(unit, "unflagged", 0.5)),
                _distance(up_to(unit, "model", SURE)),
                _distance(up_to(unit, "model", limit(unit))),
                _distance(tried[0]["radius"]),
                *(f"{found['inputs seen']}: {found['highest']:.4f}" for found in tried),
            ]
        )
    caption = (
        "Distances in standard deviations from the training mean, the strongest of all attacks; "
        f"training data: {_typical(units)}"
    )
    return Table(head, rows, caption)


def _distance(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _figure(folder: Path, units: Sequence[Unit]) -> Figure:
    caption = (
        "Left: the share of test inputs from which an attack within a ball of the largest entry "
        "fools the network, the model, and the model without being flagged. Right: the highest "
        "confidence that attacks reach at a distance from the training mean; the shaded distances "
        "are those at which some attacked input is not flagged."
    )
    near, far = (
        [unit for unit in of_kind(units, kind) if unit.result["posterior"] == "MAP"]
        for kind in ("near", "far")
    )
    size = {"nrows": len(near), "ncols": 2, "figsize": (7.6, 2.7 * len(near)), "squeeze": False}
    with drawing(folder, "attacks", caption, **size) as (_, axes, block):
        for (left, right), each, distant in zip(axes, near, far, strict=True):
            _draw_near(left, each)
            _draw_far(right, distant)
        axes[0][0].legend(fontsize=7)
        axes[0][1].legend(fontsize=7, loc="center right")
    return block


def _draw_near(ax: Any, unit: Unit) -> None:
    cells = unit.result["cells"]["linf"]
    radii = [0.0, *map(float, cells)]
    for name, text, style in (
        ("base", "the network", "-"),
        ("model", "RGPR", "--"),
        ("both", "RGPR, not flagged", ":"),
    ):
        shares = [0.0, *(100 * cell[f"{name}, fooled"] for cell in cells.values())]
        ax.plot(radii, shares, style, marker="o", ms=3, label=text)
    ax.set(
        title=label(unit), xlabel="L-inf radius", ylabel="inputs that are fooled, %", ylim=(-3, 103)
    )


def _draw_far(ax: Any, unit: Unit) -> None:
    result = unit.result
    certified = result["beyond, float32"]
    passing = up_to(unit, "unflagged", 0.5)
    if passing is not None:
        ax.axvspan(result["distances"][0], passing, color="0.9", lw=0)
    for name, text, style in (("base", "the network", "-"), ("model", "RGPR", "--")):
        ax.plot(result["distances"], highest_at(unit, name), style, label=text)
    ax.plot(certified["bound at"], certified["bound"], color=COLORS[2], label="certified bound")
    ax.axhline(1 / result["classes"], color="0.4", ls=":", lw=1)
    ax.set(title=label(unit), xscale="log", xlabel="distance", ylabel="highest confidence")
    ax.set_xlim(result["distances"][0], certified["bound at"][-1])
