"""The paper's experiments, one module each; ``rgpr paper list`` names them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

__all__ = ["EXPERIMENTS", "run_experiment"]

EXPERIMENTS = {"tuning": "objectives for sigma2 on two moons (figure) and digits (table)"}


def run_experiment(name: str, out: Path, *, seed: int = 0, small: bool = False) -> None:
    """Run the experiment and write its files into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    import_module(f".{name}", __name__).run(out, seed=seed, small=small)
