"""A model as one file, and back."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._network.running import network_dtype_device, plain_module
from ..model import _LEARNED, RGPR
from ..posteriors import Posterior
from ..residual.coordinates import Coordinates
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import CLASS_UNIT, Residual
from .container import check_same_network, read, write

__all__ = ["load", "save"]


def save(model: RGPR, path: str | os.PathLike[str]) -> None:
    """Write a model; see :meth:`RGPR.save`."""
    residual = model._fitted()
    posterior = model.posterior
    if posterior.kind is None:
        reason = posterior.no_graph or "its class has no kind, the name to be saved under"
        raise TypeError(
            f"a {type(posterior).__name__} cannot be saved: {reason}. Save what it was made from "
            "and call fit again after loading that, or give the class a kind, config() and "
            "from_saved()"
        )
    tensors = {f"network.{k}": t for k, t in posterior.network.state_dict().items()}
    tensors |= {f"posterior.{k}": t for k, t in posterior.own_tensors().items()}
    own = {name: t for name, t in residual.named_buffers(recurse=False) if t is not None}
    tensors |= {f"residual.{name}": tensor for name, tensor in own.items()}
    tensors["temperature"] = model.temperature
    learned = {name: getattr(model, name) for name in _LEARNED}
    tensors |= {f"learned.{name}": t for name, t in learned.items() if t is not None}
    every = [residual.at(index) for index in range(len(model._layers))]
    for index, coordinates in enumerate(every):
        tensors |= {f"layer.{index}.{k}": t for k, t in coordinates.state_dict().items()}
    about = {
        "posterior": posterior.kind,
        "config": posterior.config(),
        "likelihood": model.likelihood,
        "layers": model._layers,
        "coordinates": [coordinates.config() for coordinates in every],
        "residual": dataclasses.asdict(model.recipe),
        "input_shape": list(model._input_shape or ()),
        "nan": model.nan,
    }
    write(path, tensors, about)


def load(path: str | os.PathLike[str], network: nn.Module) -> RGPR:
    """The model that :meth:`RGPR.save` wrote.

    Files of rgpr 0.1 with ``residual="paper"`` load as well. Those with its default residual, which
    this version replaced, are refused: fit such a model again.

    Args:
        path: The file.
        network: A network of the same architecture. The saved weights are loaded into it, as
            with ``load_state_dict``, once everything else in the file has been checked.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or not ours, or belongs to another network.
    """
    network = plain_module(network)
    with torch.inference_mode(False):  # what is loaded must be usable outside of it
        model, weights = _read_model(path, network)
    network.load_state_dict(weights)
    device = network_dtype_device(network)[1]
    return model if device is None else model.to(device)


def _read_model(path: str | os.PathLike[str], network: nn.Module) -> tuple[RGPR, dict[str, Tensor]]:
    """The model around a network whose weights are not loaded yet, and these weights."""
    tensors, about, version = read(path)
    weights = _part(tensors, "network.")
    check_same_network(weights, network, path)
    try:
        if version == 1:
            tensors, about = _from_first_format(tensors, about, path)
        kind, layers = about["posterior"], about["layers"]
        if kind not in Posterior.kinds:
            raise ValueError(
                f"{path} holds a posterior of kind '{kind}', known here: "
                f"{sorted(Posterior.kinds)}; import the module that defines it, or upgrade rgpr"
            )
        config, own = about["config"], _part(tensors, "posterior.")
        posterior = Posterior.kinds[kind].from_saved(network, config, own)
        recipe = _recipe_from_json(about["residual"])
        model = RGPR(posterior, layers, about["likelihood"], residual=recipe, nan=about["nan"])
        coordinates = [
            Coordinates.from_saved(config, _part(tensors, f"layer.{index}."))
            for index, config in enumerate(about["coordinates"])
        ]
        residual = Residual(coordinates, combine=recipe.combine)
        scales = _part(tensors, "residual.")
        for name, buffer in list(residual.named_buffers(recurse=False)):
            if buffer is not None:
                setattr(residual, name, scales[name].to(buffer))
        model.residual = residual
        model.temperature = tensors["temperature"]
        # A file may name these tensors alone, and none of the model's other attributes.
        learned = _part(tensors, "learned.")
        for name in learned.keys() & set(_LEARNED):
            setattr(model, name, learned[name])
        model._layers, model._input_shape = layers, torch.Size(about["input_shape"])
    except KeyError as missing:
        raise ValueError(f"{path} is incomplete: it has no {missing}; save it again") from missing
    return model, weights


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}


def _recipe_from_json(about: dict[str, Any]) -> ResidualRecipe:
    strategies = {name: Strategy(**about[name]) for name in ("input", "hidden")}
    return ResidualRecipe(**{**about, **strategies})


def _from_first_format(
    tensors: dict[str, Tensor], about: dict[str, Any], path: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What rgpr 0.1 wrote, in today's form."""
    if any(config["kind"] != "moments" for config in about["coordinates"]):
        raise ValueError(
            f"{path} was saved by rgpr 0.1 with a residual that version 0.2 replaced; wrap the "
            "network again: rgpr.RGPR(network).fit(train_loader)"
        )
    dropped = {"calibration": "calibration of the confidence", "threshold": "confidence threshold"}
    found = [what for name, what in dropped.items() if name in tensors]
    if found:
        warnings.warn(
            f"{path} was saved by rgpr 0.1; its {' and its '.join(found)} "
            f"{'is' if len(found) == 1 else 'are'} left out. Call model.calibrate(val_loader), "
            "whose flags keep a promise",
            stacklevel=4,
        )
    sigma2 = tensors["sigma2"]
    recipe = {name: about["residual"][name] for name in ("input", "hidden")}
    scales = {
        "residual.sigma2": sigma2,
        # It did not keep what is typical, so scores are in other units and rank a little otherwise.
        "residual.typical": torch.ones_like(sigma2),
        "residual.slope": torch.ones_like(sigma2[0]),
        "residual.unit": torch.full_like(sigma2[0], CLASS_UNIT),
    }
    return tensors | scales, about | {"residual": recipe | {"combine": "sum"}}
