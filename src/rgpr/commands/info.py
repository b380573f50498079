"""``rgpr info``: what a model's file holds, without the network and its code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .base import Command, register_command
from .shared import Answer, add_common, answering

# How the variance that is added far from the data comes about, by its name in the file.
_RESIDUALS = {
    "onset": "onset: inputs like the training data are answered as by the base; farther out "
    "variance is added",
    "sum": "sum: the paper's, which adds a little variance at the training data too",
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a .safetensors or .pt2 file")
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    import torch

    from .. import __version__

    path: Path = options.file
    found = _of_program(path) if path.suffix == ".pt2" else _of_model(path)
    found |= {
        "bytes": path.stat().st_size,
        "read_by": f"rgpr {__version__}, torch {torch.__version__}",
    }
    words = found | _in_words(found)
    lines = [
        f"{name.replace('_', ' '):14}{_shown(value)}"
        for name, value in words.items()
        if value is not None
    ]
    return Answer([str(path), *lines], {"file": path, **found})


def _of_model(path: Path) -> dict[str, Any]:
    from ..saving.container import read

    tensors, about, version = read(path)
    if about.get("kind") == "monitor":
        raise ValueError(
            f"{path} is the state of a monitor and no model: rgpr monitor FILE DATA --model M "
            f"--state {path} goes on with it. Name the model's file instead"
        )
    learned = {k.removeprefix("learned."): t for k, t in tensors.items() if "learned." in k}
    count = learned.get("_fit_count")
    network = [t for name, t in tensors.items() if name.startswith("network.")]
    references = learned.get("_references")
    recipe = {name: part for name, part in about["residual"].items() if part is not None}
    return {
        "likelihood": about["likelihood"],
        "base": about["posterior"],
        "network": f"{sum(t.numel() for t in network)} numbers in {len(network)} tensors",
        "input": about["input_shape"],
        "columns": about.get("columns"),
        "layers": about["layers"],
        "residual": recipe["combine"],
        "fitted_on": None if count is None else int(count),
        "calibrated_on": 0 if references is None else len(references),
        "with_targets": None if references is None else "_label_scores" in learned,
        "temperature": float(tensors["temperature"]) if "temperature" in tensors else None,
        "format": version,
    }


def _of_program(path: Path) -> dict[str, Any]:
    from .._files.networks.programs import about

    found = about(path)
    if found is None:
        raise ValueError(
            f"{path} says nothing about itself; it was not written by rgpr export --form pt2"
        )
    return {
        "likelihood": found["likelihood"],
        "input": found["input_shape"],
        "columns": found["columns"],
        "layers": found["layers"],
        "outputs": found["outputs"],
        "fitted_on": found["fitted_on"],
        "calibrated_on": found["references"] or 0,
        "exported_by": f"torch {found['torch']}",
    }


def _in_words(found: dict[str, Any]) -> dict[str, str]:
    """What a reader who does not know the library's words needs explained."""
    from ..posteriors import Posterior
    from ..saving.container import FORMAT

    words = {}
    if "base" in found:
        about = (getattr(Posterior.kinds.get(found["base"]), "__doc__", None) or "").splitlines()
        words["base"] = found["base"] + (f": {about[0]}" if about else "")
    if "residual" in found:
        words["residual"] = _RESIDUALS[found["residual"]]
    if "format" in found:
        words["format"] = f"version {found['format']} of the file's layout; {FORMAT} is the newest"
    return words


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


register_command(
    "info",
    Command(
        "what a model's file holds: layers, data, calibration, versions; runs no code",
        _add_options,
        answering(_run),
        "Say what was fitted and calibrated, from the file alone. No network is needed, and no\n"
        "code is run.",
        "rgpr info m.safetensors\nrgpr info m.pt2 --json",
    ),
)
