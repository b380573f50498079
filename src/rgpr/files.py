"""A model as one file, and back."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor, nn

from .coordinates import Coordinates, ResidualRecipe, Strategy
from .data import network_dtype_device
from .hooks import plain_module
from .model import RGPR
from .posteriors import Posterior
from .residual import Residual
from .storage import check_same_network, read, write

__all__ = ["load", "save"]


def save(model: RGPR, path: str | os.PathLike[str]) -> None:
    """Write a model; see :meth:`RGPR.save`."""
    residual = model._fitted()
    posterior = model.posterior
    if posterior.kind is None:
        raise TypeError(
            f"a {type(posterior).__name__} predicts through the object it was made from, "
            "which cannot be saved here; save that object and call fit again after loading it"
        )
    tensors = {f"network.{k}": t for k, t in posterior.network.state_dict().items()}
    tensors |= {f"posterior.{k}": t for k, t in posterior.own_tensors().items()}
    tensors |= {"sigma2": residual.sigma2, "temperature": model.temperature}
    optional = {"calibration": model.calibration, "threshold": model._threshold}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
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

    Args:
        path: The file.
        network: A network of the same architecture. The saved weights are loaded into it, as
            with ``load_state_dict``, once everything else in the file has been checked.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or not ours, or belongs to another network.
    """
    tensors, about = read(path)
    network = plain_module(network)

    def part(prefix: str) -> dict[str, Tensor]:
        return {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}

    weights = part("network.")
    check_same_network(weights, network, path)
    try:
        kind, layers = about["posterior"], about["layers"]
        if kind not in Posterior.kinds:
            raise ValueError(
                f"{path} holds a posterior of kind '{kind}', known here: "
                f"{sorted(Posterior.kinds)}; import the module that defines it, or upgrade rgpr"
            )
        posterior = Posterior.kinds[kind].from_saved(network, about["config"], part("posterior."))
        recipe = _recipe_from_json(about["residual"])
        model = RGPR(posterior, layers, about["likelihood"], residual=recipe, nan=about["nan"])
        coordinates = [
            Coordinates.from_saved(config, part(f"layer.{index}."))
            for index, config in enumerate(about["coordinates"])
        ]
        model.residual = Residual(coordinates, tensors["sigma2"])
        model.temperature = tensors["temperature"]
        model.calibration = tensors.get("calibration")
        model._threshold = tensors.get("threshold")
        model._layers, model._input_shape = layers, torch.Size(about["input_shape"])
    except KeyError as missing:
        raise ValueError(f"{path} is incomplete: it has no {missing}; save it again") from missing
    network.load_state_dict(weights)
    device = network_dtype_device(network)[1]
    return model if device is None else model.to(device)


def _recipe_from_json(about: dict[str, Any]) -> ResidualRecipe:
    strategies = {name: Strategy(**about[name]) for name in ("input", "hidden")}
    return ResidualRecipe(**{**about, **strategies})
