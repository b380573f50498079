"""A model as one file, and back: which tensors are written, and how parts are made of them.

To change the format, change :func:`save`, :func:`load` and ``parts``, raise ``FORMAT`` in
``container``, and convert files of the old one as ``_from_first_format`` does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..residual.variance import CLASS_UNIT
from .container import check_same_network, read, write
from .parts import Parts, describe, part, put_together

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], parts: Parts) -> None:
    """Write a model, atomically; see :meth:`rgpr.RGPR.save`."""
    extension = parts.extension
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
    tensors |= {f"learned.{name}": tensor for name, tensor in parts.learned.items()}
    for index in range(len(extension.layers)):
        state = residual.at(index).state_dict()
        tensors |= {f"layer.{index}.{k}": t for k, t in state.items()}
    write(path, tensors, describe(parts))


def load(path: str | os.PathLike[str], network: nn.Module) -> tuple[Parts, dict[str, Tensor]]:
    """What :func:`save` wrote: the parts over a network that stays as it is, and its weights.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or not ours, or belongs to another network.
    """
    tensors, about, version = read(path)
    if isinstance(about, Mapping) and "kind" in about:
        raise ValueError(
            f"{path} holds {about['kind']} and no model; load it by the class that saved it"
        )
    weights = part(tensors, "network.")
    check_same_network(weights, network, path)
    if version == 1:
        tensors, about = _from_first_format(tensors, about, path)
    return put_together(about, tensors, network, path), weights


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
