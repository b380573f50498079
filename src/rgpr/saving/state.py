"""A model as a ``state_dict``, from which a model that was not fitted is made whole.

torch's state holds tensors by the names of modules, and modules that are not there cannot be named.
So the description of the parts goes with them, as JSON in a tensor of bytes: no pickle, and
``torch.load(weights_only=True)`` and safetensors take it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..posteriors import Posterior
from .container import check_same_network
from .parts import Parts, describe, part, put_together

__all__ = ["KEY", "described", "parts_of"]

# Where torch puts what ``get_extra_state`` gives.
KEY = "_extra_state"
_WHERE = "the state"
_LAYER = "residual.coordinates."


def described(parts: Parts | None) -> Tensor:
    """The description of a model as bytes, ``(N,)``; none for a model that was not fitted."""
    text = "" if parts is None else json.dumps(describe(parts))
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())


def parts_of(state: Mapping[str, Any], prefix: str, posterior: Posterior) -> Parts:
    """The parts of the model whose state this is, with tensors of their own.

    Args:
        state: A ``state_dict`` with a description.
        prefix: Of the model's names in it.
        posterior: What the model has now; it is kept if it is of the state's kind and sizes.

    Raises:
        ValueError: The state belongs to another network, or to a posterior that cannot be made
            from it.
    """
    mine = {name: t for name, t in part(state, prefix).items() if isinstance(t, Tensor)}
    about = json.loads(bytes(mine.pop(KEY).cpu().numpy()))
    weights = part(mine, "posterior.network.")
    check_same_network(weights, posterior.network, _WHERE, dtypes=False)
    own = {k: t for k, t in part(mine, "posterior.").items() if not k.startswith("network.")}
    tensors = {f"posterior.{name}": tensor for name, tensor in own.items()}
    for name, tensor in mine.items():
        if name.startswith(_LAYER):
            tensors[f"layer.{name[len(_LAYER) :]}"] = tensor
        elif name.startswith("residual."):
            tensors[name] = tensor
        elif name == "_temperature":
            tensors["temperature"] = tensor
        elif not name.startswith("posterior."):
            tensors[f"learned.{name}"] = tensor
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    base = posterior if _same(posterior, about, own) else posterior.network
    if about["posterior"] is None and base is not posterior:
        raise ValueError(
            f"{_WHERE} is of a model over another posterior than this {type(posterior).__name__}, "
            "and it cannot be made from a state; wrap what that model wrapped"
        )
    return put_together(about, tensors, base, _WHERE)


def _same(posterior: Posterior, about: Mapping[str, Any], own: Mapping[str, Tensor]) -> bool:
    """Whether the posterior is of the kind, the configuration and the sizes of the state."""
    if about["posterior"] != posterior.kind:
        return False
    if json.dumps(about["config"]) != json.dumps(posterior.config()):
        return False
    here = {name: tensor.shape for name, tensor in posterior.own_tensors().items()}
    return here == {name: tensor.shape for name, tensor in own.items()}
