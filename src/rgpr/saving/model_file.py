"""A model as one file, and back: which tensors are written, and how parts are made of them.

To change the format, change :func:`save` and :func:`load`, raise ``FORMAT`` in ``container``, and
convert files of the old one as ``_from_first_format`` does.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Shape
from .._network.representation import Representation
from ..extension import Extension
from ..likelihoods import likelihood_named
from ..posteriors import Posterior
from ..residual.coordinates import Coordinates
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import CLASS_UNIT, Residual
from .container import check_same_network, read, write

__all__ = ["Saved", "load", "save"]


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        extension: The base over a network whose weights are not loaded yet, and its residual.
        recipe: How the residual was made.
        learned: Tensors that a fit or a calibration made, by name.
        weights: The network's own state.
    """

    extension: Extension
    recipe: ResidualRecipe
    learned: dict[str, Tensor]
    weights: dict[str, Tensor]


def save(
    path: str | os.PathLike[str],
    extension: Extension,
    recipe: ResidualRecipe,
    learned: Mapping[str, Tensor],
) -> None:
    """Write a model, atomically; see :meth:`rgpr.RGPR.save`.

    Args:
        path: The file.
        extension: The base and its residual.
        recipe: How the residual was made.
        learned: Tensors that a fit or a calibration made, by name.
    """
    residual, posterior = extension.residual, extension.posterior
    if posterior.kind is None:
        reason = posterior.no_graph or "its class has no kind, the name to be saved under"
        raise TypeError(
            f"a {type(posterior).__name__} cannot be saved: {reason}. Save what it was made from "
            "and call fit again after loading that, or give the class a kind, config() and "
            "from_saved()"
        )
    if callable(posterior.output):
        raise TypeError(
            "output= is a function, which a file cannot hold; name the part of what the network "
            "returns by its index or key, as in output=0, or wrap the network in a module that "
            "returns the tensor"
        )
    tensors = {f"network.{k}": t for k, t in posterior.network.state_dict().items()}
    tensors |= {f"posterior.{k}": t for k, t in posterior.own_tensors().items()}
    own = {name: t for name, t in residual.named_buffers(recurse=False) if t is not None}
    tensors |= {f"residual.{name}": tensor for name, tensor in own.items()}
    tensors["temperature"] = extension.temperature
    tensors |= {f"learned.{name}": tensor for name, tensor in learned.items()}
    every = [residual.at(index) for index in range(len(extension.layers))]
    for index, coordinates in enumerate(every):
        tensors |= {f"layer.{index}.{k}": t for k, t in coordinates.state_dict().items()}
    about = {
        "posterior": posterior.kind,
        "config": posterior.config(),
        "likelihood": extension.likelihood.name,
        "layers": extension.layers,
        "axes": [[each.batch, each.channel, each.token] for each in extension.representations],
        "coordinates": [coordinates.config() for coordinates in every],
        "residual": dataclasses.asdict(recipe),
        "input_shape": _shape_to_json(extension.input_shape),
        "nan": extension.nan,
        "input": extension.source,
        "output": posterior.output,
    }
    write(path, tensors, about)


def load(path: str | os.PathLike[str], network: nn.Module) -> Saved:
    """Read what :func:`save` wrote; the network stays as it is.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or not ours, or belongs to another network.
    """
    tensors, about, version = read(path)
    weights = _part(tensors, "network.")
    check_same_network(weights, network, path)
    try:
        if version == 1:
            tensors, about = _from_first_format(tensors, about, path)
        kind = about["posterior"]
        if kind not in Posterior.kinds:
            raise ValueError(
                f"{path} holds a posterior of kind '{kind}', known here: "
                f"{sorted(Posterior.kinds)}; import the module that defines it, or upgrade rgpr"
            )
        config, own = about["config"], _part(tensors, "posterior.")
        recipe = _recipe_from_json(about["residual"])
        coordinates = [
            Coordinates.from_saved(config, _part(tensors, f"layer.{index}."))
            for index, config in enumerate(about["coordinates"])
        ]
        residual = Residual(coordinates, combine=recipe.combine)
        scales = _part(tensors, "residual.")
        for name, buffer in list(residual.named_buffers(recurse=False)):
            if buffer is not None:
                setattr(residual, name, scales[name].to(buffer))
        posterior = Posterior.kinds[kind].from_saved(network, config, own)
        if about.get("output") is not None:  # files of earlier versions know no such things
            posterior.output = about["output"]
        extension = Extension(
            posterior,
            residual,
            _representations(about),
            _shape_from_json(about["input_shape"]),
            likelihood_named(about["likelihood"]),
            tensors["temperature"],
            about["nan"],
        )
    except KeyError as missing:
        raise ValueError(f"{path} is incomplete: it has no {missing}; save it again") from missing
    return Saved(extension, recipe, _part(tensors, "learned."), weights)


def _representations(about: dict[str, Any]) -> list[Representation]:
    """What is read of the network; files without axes mean the usual ones."""
    if "axes" not in about:
        raw = [config["of"] == "raw" for config in about["coordinates"]]
        about = about | {"axes": [[0, 1 if each else None, None] for each in raw]}
    pairs = zip(about["layers"], about["axes"], strict=True)
    first, *others = [Representation(name, *axes) for name, axes in pairs]
    return [dataclasses.replace(first, source=about.get("input")), *others]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}


def _shape_to_json(shape: Shape) -> Any:
    if isinstance(shape, torch.Size):
        return list(shape)
    return {name: list(sizes) for name, sizes in shape.items()}


def _shape_from_json(shape: Any) -> Shape:
    if isinstance(shape, list):
        return torch.Size(shape)
    return {name: tuple(sizes) for name, sizes in shape.items()}


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
