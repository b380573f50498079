"""What tuning did, to read and to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._axes import row, write
from .search import Trial

__all__ = ["TuningResult"]


@dataclass(frozen=True)
class TuningResult:
    """The outcome of :meth:`rgpr.RGPR.tune`; ``print`` it, or :meth:`plot` it.

    Attributes:
        objective: Its name.
        before: Its value before, larger is better.
        after: Its value now.
        sigma2: The new scale of each layer.
        share: For each layer, the median of what it adds to the variance at the data and, where
            there are any, at the outliers: ``(at data, at outliers)``.
        temperature: The new temperature.
        noise: Regression: variance of the observations that was assumed or found.
        ood_weight: Weight of the outliers.
        metrics: Validation metrics and mean confidences, each ``(before, after)``.
        trials: With a budget, the weights that were tried.
        converged: Whether the gradient vanished where the search ended.
        history: The best objective so far, at each evaluation.
        examples: How many validation examples and outliers were used.
        seen: How many there were.
        seconds: How long it took, reading included.
        warnings: What to think about.
    """

    objective: str
    before: float
    after: float
    sigma2: dict[str, float]
    share: dict[str, tuple[float, float | None]]
    temperature: float
    noise: float | None
    ood_weight: float | None
    metrics: dict[str, tuple[float, float]]
    trials: list[Trial]
    converged: bool
    history: list[float] = field(repr=False)
    examples: tuple[int, int]
    seen: tuple[int, int]
    seconds: float
    warnings: list[str]

    def __str__(self) -> str:
        kept = " and ".join(
            f"{used} of {seen} {what}" if used < seen else f"{seen} {what}"
            for used, seen, what in zip(
                self.examples, self.seen, ("examples", "outliers"), strict=True
            )
            if seen
        )
        state = "converged" if self.converged else "NOT converged"
        lines = [
            f"{self.objective}: {self.before:.4f} -> {self.after:.4f}, {state}, "
            f"{len(self.history)} evaluations on {kept}, {self.seconds:.2f} s"
        ]
        if self.ood_weight is not None:
            tried = f" of {len(self.trials)} tried" if len(self.trials) > 1 else ""
            how = f", the largest{tried} within the budget" if self.trials else ""
            lines.append(f"weight of the outliers {self.ood_weight:.3g}{how}")
        if self.temperature != 1:
            lines.append(f"temperature {self.temperature:.3g}")
        if self.noise is not None:
            lines.append(f"variance of the observations {self.noise:.3g}")
        lines += [f"{name}: {a:.4f} -> {b:.4f}" for name, (a, b) in self.metrics.items()]
        width = max(5, *map(len, self.sigma2))
        lines.append(f"{'layer':{width}}  {'sigma2':>10}  median v at data  at outliers")
        for name, value in self.sigma2.items():
            data, outliers = self.share[name]
            far = "-" if outliers is None else f"{outliers:.3g}"
            lines.append(f"{name:{width}}  {value:>10.3g}  {data:>16.3g}  {far:>11}")
        return "\n".join([*lines, *(f"! {warning}" for warning in self.warnings)])

    def plot(self, path: str | Path | None = None) -> Any:
        """The climb, and what each layer adds to the variance; an array of two matplotlib Axes.

        Args:
            path: Where to write it as a picture, if anywhere. The figure is closed then.
        """
        left, right = axes = row(2, height=3.2)
        left.plot(self.history)
        left.axhline(self.before, color="0.5", ls=":", label="before")
        left.set(xlabel="evaluation", ylabel=self.objective, title="best so far")
        low = min(self.before, self.history[-1])
        margin = 0.1 * abs(self.history[-1] - low) or 0.1
        left.set_ylim(low - margin, self.history[-1] + margin)
        left.legend(frameon=False)
        floor = 1e-10
        places = range(len(self.sigma2))
        for offset, label, which in ((-0.2, "data", 0), (0.2, "outliers", 1)):
            values = [pair[which] for pair in self.share.values()]
            if None not in values:
                heights = [max(float(value or 0), floor) for value in values]
                right.bar([p + offset for p in places], heights, 0.4, label=label)
        right.set_xticks(list(places), list(self.sigma2), rotation=30, ha="right")
        right.set(yscale="log", title="variance added by each layer (median)")
        right.legend(frameon=False)
        write(left, path, made=True)
        return axes
