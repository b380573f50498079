"""What a monitor says, for people, for log files as JSON lines and for Prometheus as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LayerDrift", "Status", "json_line", "prometheus"]


@dataclass(frozen=True)
class LayerDrift:
    """Whether the strangeness that one representation sees has drifted.

    Attributes:
        name: The representation.
        log10: The logarithm to base 10 of its martingale.
        drifted: Whether its martingale has ever reached ``L / alpha`` for ``L`` layers.
        when: Number of the input at which it did, counted from 1; ``None`` if it did not.
        since: Number of the input from which on it seems to have drifted.
    """

    name: str
    log10: float
    drifted: bool
    when: int | None
    since: int | None


@dataclass(frozen=True)
class Status:
    """Where a monitor stands after a batch; ``print`` it.

    Attributes:
        count: How many inputs were read so far.
        log10: The logarithm to base 10 of the martingale; the alarm is raised at
            ``log10(1 / alpha)``.
        alarm: Whether an alarm was raised, by this batch or before it.
        new: Whether this batch raised it.
        when: Number of the input that raised it, counted from 1.
        since: Number of the input from which on inputs seem to have drifted.
        since_time: When that input came, if times were given.
        drifted: Names of the layers that drifted, the one with the most evidence first.
        nans: How many scores so far were NaN; these count as the strangest.
        alpha: The monitor's level.
    """

    count: int
    log10: float
    alarm: bool
    new: bool
    when: int | None
    since: int | None
    since_time: float | None
    drifted: tuple[str, ...]
    nans: int
    alpha: float

    def __str__(self) -> str:
        if not self.alarm:
            return (
                f"no alarm after {self.count} inputs; the evidence for a drift is "
                f"{10**self.log10:.2g}, and {1 / self.alpha:g} raises the alarm"
            )
        layers = f"; drifted layers: {', '.join(self.drifted)}" if self.drifted else ""
        return (
            f"ALARM at input {self.when} of {self.count}, drifting since about input "
            f"{self.since}{layers}"
        )


def json_line(report: Status, about: Mapping[str, Any], layers: list[LayerDrift]) -> str:
    """One line of JSON, without a line break at its end."""
    content = {**asdict(report), **about, "layers": [asdict(layer) for layer in layers]}
    return json.dumps(content, allow_nan=False)


def prometheus(
    report: Status, layers: list[LayerDrift], performance: Mapping[str, float], labels: Any
) -> str:
    """Text in the format that Prometheus reads (version 0.0.4).

    Args:
        report: Where the monitor stands.
        layers: Its layers.
        performance: Measures of the last window with labels.
        labels: Names and values that every line carries.
    """
    lines: list[str] = []

    def metric(name: str, kind: str, what: str, values: list[tuple[dict[str, str], float]]) -> None:
        if values:
            lines.append(f"# HELP rgpr_monitor_{name} {what}")
            lines.append(f"# TYPE rgpr_monitor_{name} {kind}")
        for own, value in values:
            pairs = {**labels, **own}
            inside = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in pairs.items())
            shown = f"{{{inside}}}" if inside else ""
            lines.append(f"rgpr_monitor_{name}{shown} {value!r}")

    metric("inputs_total", "counter", "Inputs read.", [({}, report.count)])
    metric("nan_scores_total", "counter", "Scores that were NaN.", [({}, report.nans)])
    metric("log10_martingale", "gauge", "Evidence for a drift.", [({}, report.log10)])
    metric("alarm", "gauge", "1 once an alarm was raised.", [({}, int(report.alarm))])
    if report.since is not None:
        metric("since_input", "gauge", "Where the drift began.", [({}, report.since)])
    if report.since_time is not None:
        metric("since_time", "gauge", "When the drift began.", [({}, report.since_time)])
    each = [({"layer": layer.name}, layer.log10) for layer in layers]
    metric("layer_log10_martingale", "gauge", "Evidence for a drift of a layer.", each)
    flags: list[tuple[dict[str, str], float]] = [
        ({"layer": layer.name}, int(layer.drifted)) for layer in layers
    ]
    metric("layer_drifted", "gauge", "1 once a layer has drifted.", flags)
    for name, value in performance.items():
        metric(name, "gauge", "Of the last window with labels.", [({}, value)])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
