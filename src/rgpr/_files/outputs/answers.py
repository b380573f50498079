"""What is said of a batch of rows: arrays by name, from a model or from a program in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...answers import Predictions, conformal
from ...likelihoods import LabelLikelihood, Likelihood, likelihood_named
from ...model import RGPR
from ..networks.networks import dtype_of, model
from ..networks.programs import about, open_program

__all__ = ["Answers", "Levels", "from_model", "from_program", "opened"]

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Levels:
    """What is promised.

    Attributes:
        alpha: The level of flags; ``None`` for 0.05.
        coverage: That of sets and intervals; ``None`` for 0.9.
        scores: Whether scores and p-values are all that is wanted.
    """

    alpha: float | None = None
    coverage: float | None = None
    scores: bool = False


@dataclass(frozen=True)
class Answers:
    """What answers, and what it must be given.

    Attributes:
        of: Arrays of a batch of inputs.
        dtype: Of the inputs.
        shape: Of one input, where it is known.
        columns: Names of the columns that the model was fitted on.
        calibrated: Whether there are p-values.
    """

    of: Callable[[Tensor], Arrays]
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    columns: tuple[str, ...] | None
    calibrated: bool


def opened(path: Path, spec: str | None, device: str, levels: Levels) -> Answers:
    """The answers of the model in a file.

    Args:
        path: A model's ``.safetensors`` file, or a ``.pt2`` program.
        spec: The network; none for a program.
        device: Where it is to run.
        levels: What is promised.
    """
    if path.suffix == ".pt2":
        if spec is not None:
            raise ValueError(f"{path} holds its network: leave out --model {spec}")
        if device != "cpu":
            raise ValueError(f"--device {device}: a .pt2 program runs where it was exported, cpu")
        return from_program(path, levels)
    if spec is None:
        raise ValueError(
            f"{path} holds no network, only its weights: name the network by --model "
            "package.module:factory, or give a .pt2 file"
        )
    return from_model(model(path, spec, device), levels)


def from_model(model: RGPR, levels: Levels) -> Answers:
    """The answers of a model."""
    shape = model._input_shape
    return Answers(
        _scores(model) if levels.scores else _predictions(model, levels),
        dtype_of(model.posterior.network),
        tuple(shape) if isinstance(shape, torch.Size) else None,
        model._columns,
        model._references is not None,
    )


def _predictions(model: RGPR, levels: Levels) -> Callable[[Tensor], Arrays]:
    if levels.coverage is not None and model._label_scores is None:
        raise ValueError(
            f"--coverage {levels.coverage}: the model was not calibrated with targets, which sets "
            "and intervals need; run rgpr calibrate with labelled data"
        )
    alpha = _alpha(levels, model._references is not None)
    if model._references is not None:
        conformal.check_level("--alpha", alpha, model._references)
    coverage = 0.9 if levels.coverage is None else levels.coverage
    conformal.check_share("--coverage", coverage)

    def of(x: Tensor) -> Arrays:
        found = model.predict([(x, None)], alpha=alpha, coverage=coverage, progress=False)
        return dict(found._arrays())

    return of


def _alpha(levels: Levels, calibrated: bool) -> float:
    if levels.alpha is not None and not calibrated:
        raise ValueError(
            f"--alpha {levels.alpha}: the model was not calibrated, so that there are no p-values "
            "to flag by; run rgpr calibrate"
        )
    return 0.05 if levels.alpha is None else levels.alpha


def _scores(model: RGPR) -> Callable[[Tensor], Arrays]:
    device = model._device

    @torch.no_grad()
    def of(x: Tensor) -> Arrays:
        score = model.score(x.to(device))
        found = {"score": score.cpu().numpy()}
        if model._references is not None:
            found["p_value"] = conformal.p_values(score, model._references).cpu().numpy()
        return found

    return of


# -- programs --------------------------------------------------------------------------------------


def from_program(path: Path, levels: Levels) -> Answers:
    """The answers of a ``.pt2`` file, by ``rgpr export`` or of a program with a score."""
    described = about(path) or {}
    program = open_program(path)
    inputs = [node for node in program.graph.nodes if node.name in _inputs(program)]
    if len(inputs) != 1:
        raise ValueError(f"{path} takes {len(inputs)} inputs; only programs of one are run here")
    value, references = inputs[0].meta["val"], described.get("references")
    if levels.coverage is not None:
        raise ValueError(
            f"--coverage {levels.coverage}: a .pt2 program gives no sets and intervals; predict "
            "with the .safetensors file and --model"
        )
    sizes = value.shape[1:]
    shape = tuple(sizes) if all(isinstance(size, int) for size in sizes) else None
    call, named = program.module(), described.get("likelihood")
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    names = described.get("outputs") or _names(path, outputs)
    alpha = _alpha(levels, "p_value" in names)
    if references is not None and not levels.scores:
        conformal.check_level("--alpha", alpha, torch.empty(references))
    likelihood = None if named is None else likelihood_named(named)

    @torch.no_grad()
    def of(x: Tensor) -> Arrays:
        if shape is not None and tuple(x.shape[1:]) != shape:
            raise ValueError(
                f"the data have rows of shape {tuple(x.shape[1:])}, and {path} takes {shape}"
            )
        found = dict(zip(names, call(x), strict=True))
        if levels.scores:
            wanted = {name: found[name] for name in ("score", "p_value") if name in found}
        else:
            wanted = _everything(found, alpha, likelihood)
        return {name: tensor.numpy() for name, tensor in wanted.items()}

    columns = described.get("columns")
    return Answers(
        of,
        value.dtype if value.dtype.is_floating_point else torch.get_default_dtype(),
        shape,
        None if columns is None else tuple(columns),
        "p_value" in names,
    )


def _inputs(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    return tuple(map(str, program.graph_signature.user_inputs))


def _names(path: Path, outputs: list[Any]) -> list[str]:
    """Names for the outputs of a program that says none: scores and p-values have one axis."""
    front = [each for each in outputs if each.dim() > 1]
    single = [each for each in outputs if each.dim() == 1]
    if not single or len(single) > 2 or outputs[: len(front)] != front or len(front) not in (1, 2):
        raise ValueError(
            f"{path} gives no score, so it is a network alone; fit it by rgpr fit --model {path}, "
            "or export a fitted model by rgpr export"
        )
    names = ["output"] if len(front) == 1 else ["mean", "covariance"]
    return [*names, *["score", "p_value"][: len(single)]]


def _everything(
    found: dict[str, Tensor], alpha: float, likelihood: Likelihood | None
) -> dict[str, Tensor]:
    """What a model says of a batch, from what a graph gives."""
    wanted = dict(found)
    if "covariance" in wanted:
        wanted["variance"] = wanted.pop("covariance").diagonal(dim1=-2, dim2=-1)
    if isinstance(likelihood, LabelLikelihood):
        p = wanted["probabilities"]
        label = likelihood.prediction(p)
        unknown = p.isnan().any(1).reshape(-1, *[1] * (label.dim() - 1))
        wanted["label"], wanted["confidence"] = (
            torch.where(unknown, -1, label),
            likelihood.confidence(p),
        )
    if "p_value" in wanted:
        wanted["flag"] = (wanted["p_value"] <= alpha) | wanted["p_value"].isnan()
    order = [field.name for field in fields(Predictions)]
    return {name: wanted[name] for name in sorted(wanted, key=[*order, *wanted].index)}
