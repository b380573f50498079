"""The paper's experiments, one module each; ``rgpr paper list`` names them."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

__all__ = ["EXPERIMENTS", "run_experiment"]

EXPERIMENTS = {
    "tuning": "objectives for sigma2 on two moons (figure) and digits (table)",
    "detection": "outliers found and calibration kept, ten methods on the same networks (table)",
}


def run_experiment(
    name: str, out: Path, *, seed: int = 0, small: bool = False, **options: Any
) -> None:
    """Run the experiment and write its files into ``out``.

    Raises:
        TypeError: The experiment has no such option.
    """
    run = import_module(f".{name}", __name__).run
    unknown = [option for option in options if option not in signature(run).parameters]
    if unknown:
        raise TypeError(f"experiment '{name}' has no option {', '.join(map(repr, unknown))}")
    out.mkdir(parents=True, exist_ok=True)
    run(out, seed=seed, small=small, **options)
