"""What follows from the attacks: what they must not do, and what they can do, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ..section import Claim
from ..units import Unit
from .far import EPS
from .numbers import (
    NORM_NAMES,
    from_noise,
    highest_at,
    label,
    largest_radius,
    limit,
    of_kind,
    up_to,
)

__all__ = ["claims"]


def claims(units: Sequence[Unit]) -> list[Claim]:
    """The attack works, near the data it wins, far away it loses."""
    near, noise, far = (of_kind(units, kind) for kind in ("near", "noise", "far"))
    return [
        _works(units),
        _no_defence(near),
        _both(units),
        _network_alone(units),
        _noise_is_flagged(noise),
        _noise_is_unsure(noise),
        _flagged_from(far),
        _beyond(far),
        _pessimistic(far),
    ]


def _works(units: Sequence[Unit]) -> Claim:
    found = {name: 100 * cell["base, fooled"] for name, cell in largest_radius(units)}
    worst = min(found, key=found.__getitem__)
    return Claim(
        "The attack works: it fools the base from at least 95 % of the test inputs, at the "
        "largest radius of every norm",
        f"{found[worst]:.0f} % at least ({worst})",
        found[worst] >= 95,
        ours=True,
    )


def _no_defence(near: Sequence[Unit]) -> Claim:
    less = {
        f"{label(unit)}, {NORM_NAMES[norm]} {radius}": 100
        * (cell["base, fooled"] - cell["model, fooled"])
        for unit in near
        for norm, cells in unit.result["cells"].items()
        for radius, cell in cells.items()
    }
    most = max(less, key=less.__getitem__)
    return Claim(
        "Near the data the residual is no defence: an attack fools RGPR from as many inputs as "
        "the base, within 10 points, in every ball",
        f"at most {less[most]:.0f} points fewer ({most})",
        less[most] <= 10,
        ""
        if less[most] <= 10
        else "Where the ball reaches beyond the onset, the residual takes confidence from some "
        "of the attacked inputs. It is no more than that.",
        ours=True,
    )


def _both(units: Sequence[Unit]) -> Claim:
    found = {name: 100 * cell["both, fooled"] for name, cell in largest_radius(units)}
    passing = [
        100 * cell["passing"] for _, cell in largest_radius(units) if cell["passing"] is not None
    ]
    worst = min(found, key=found.__getitem__)
    return Claim(
        "Nor is the flag: an attacker of both fools RGPR without being flagged from at least 90 % "
        "of the test inputs at the largest radius, and makes as many flagged inputs pass",
        f"{found[worst]:.0f} % at least ({worst}); {min(passing, default=0):.0f} % of flagged "
        "inputs pass at least",
        found[worst] >= 90 and min(passing, default=0) >= 90,
        "" if found[worst] >= 90 else "The attack is no proof; a stronger one may reach more.",
        ours=True,
    )


def _network_alone(units: Sequence[Unit]) -> Claim:
    shares = {
        name: 100 * cell["base, fooled and flagged"] / cell["base, fooled"]
        for name, cell in largest_radius(units)
        if cell["base, fooled"]
    }
    worst = min(shares, key=shares.__getitem__)
    holds = shares[worst] >= 50
    return Claim(
        "Attacks on the network alone, by somebody who does not know of the score, are flagged "
        "at least every second time at the largest radius",
        "; ".join(f"{name}: {share:.0f} %" for name, share in shares.items()),
        holds,
        ""
        if holds
        else "An attack that raises the network's confidence raises its evidence, which the score "
        "divides by. Where it moves the hidden layers towards another class, and not away from "
        "all of them, the input becomes less strange by it. The flag finds no attacks.",
        ours=True,
    )


def _noise_is_flagged(noise: Sequence[Unit]) -> Claim:
    flagged = {
        f"{label(unit)}, {factor} x, share {share}": 100 * cell["flagged after"]
        for unit in noise
        for (factor, share), cell in from_noise(unit).items()
        if float(factor) >= 10 and float(share) <= 0.5
    }
    worst = min(flagged, key=flagged.__getitem__)
    return Claim(
        "Noise at 10 x and 1000 x the scale of the data stays flagged in every norm while the "
        "attacker keeps half of its distance",
        f"{flagged[worst]:.0f} % at least ({worst})",
        flagged[worst] == 100,
        "" if flagged[worst] == 100 else _SILENT,
        ours=True,
    )


_SILENT = (
    "The score is a geometric mean of the hidden layers and a thousandth of the distance of the "
    "input itself. An attacker who finds inputs that hidden layers take for data is held by that "
    "thousandth alone."
)


def _noise_is_unsure(noise: Sequence[Unit]) -> Claim:
    above = {
        f"{label(unit)}, share {share}": cell["model, highest"]
        for unit in noise
        for (factor, share), cell in from_noise(unit).items()
        if float(factor) >= 1000 and float(share) <= 0.5
    }
    worst = max(above, key=above.__getitem__)
    return Claim(
        f"Noise at 1000 x stays below 1/C + {EPS:g} in every norm while the attacker keeps half "
        "of its distance",
        f"{above[worst]:.3f} at most ({worst})",
        above[worst] <= 0.1 + EPS,
        "" if above[worst] <= 0.1 + EPS else _SILENT,
        ours=True,
    )


def _flagged_from(far: Sequence[Unit]) -> Claim:
    times = {
        label(unit): (up_to(unit, "unflagged", 0.5) or 0.0) / unit.result["typical"] for unit in far
    }
    return Claim(
        "At 100 times the typical distance of the data and beyond every attacked input is flagged",
        "not flagged up to "
        + "; ".join(f"{name}: {value:.3g} times" for name, value in times.items()),
        all(value < 100 for value in times.values()),
        "" if all(value < 100 for value in times.values()) else _SILENT,
        ours=True,
    )


def _beyond(far: Sequence[Unit]) -> Claim:
    found = [unit.result[f"beyond, {d}"] for unit in far for d in ("float32", "float64")]
    seen = sum(each["inputs seen"] for each in found)
    highest = max(each["highest"] for each in found)
    return Claim(
        f"No attacked input beyond the certified radius has a confidence above 1/C + {EPS:g}, in "
        "float32 and in float64",
        f"{highest:.4f} is the highest of {seen} inputs; the limit is {limit(far[0]):.2f}",
        all(each["covered"] and each["highest"] <= each["limit"] for each in found),
        ours=True,
    )


def _pessimistic(far: Sequence[Unit]) -> Claim:
    ratios = {}
    surer = []
    for unit in far:
        reached = up_to(unit, "model", limit(unit)) or unit.result["distances"][0]
        ratios[label(unit)] = unit.result["beyond, float32"]["radius"] / reached
        base, model = (highest_at(unit, name) for name in ("base", "model"))
        surer += [label(unit) for a, b in zip(base, model, strict=True) if b > a + 0.01]
    return Claim(
        f"The strongest attack falls below 1/C + {EPS:g} at a hundredth of the certified radius, "
        "and at no distance is RGPR made surer than its base",
        "the radius is larger by "
        + "; ".join(f"{name}: {ratio:.3g} times" for name, ratio in ratios.items())
        + (f"; surer: {', '.join(sorted(set(surer)))}" if surer else ""),
        all(ratio >= 100 for ratio in ratios.values()) and not surer,
        "" if all(ratio >= 100 for ratio in ratios.values()) and not surer else _STRONGER,
        ours=True,
    )


_STRONGER = "Attacks come nearer to the certified radius than that; the certificate holds."
