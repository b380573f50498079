"""A model as a file that holds its network too, with a word on what comes out of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from ..._atomic import replacing
from ...likelihoods import likelihood_named
from ...model import RGPR
from ...saving import export
from .networks import dtype_of
from .programs import ABOUT

__all__ = ["write_onnx", "write_program"]


def write_onnx(model: RGPR, path: Path) -> list[str]:
    """Write the model as an ONNX file; returns the names of its outputs."""
    export.onnx(model, path, _example(model))
    return _outputs(model)


def write_program(model: RGPR, path: Path) -> list[str]:
    """Write the model as a ``.pt2`` file; returns the names of its outputs."""
    outputs, shape = _outputs(model), model._input_shape
    program = export.program(model, _example(model), everything=True)
    about = {
        "likelihood": model.likelihood,
        "layers": model.layers,
        "outputs": outputs,
        "columns": None if model._columns is None else list(model._columns),
        "input_shape": list(shape) if isinstance(shape, torch.Size) else None,
        "references": None if model._references is None else len(model._references),
        "fitted_on": None if model._fit_count is None else int(model._fit_count),
        "torch": str(torch.__version__),
    }
    with replacing(path) as temporary:
        torch.export.save(program, temporary, extra_files={ABOUT: json.dumps(about)})
    return outputs


def _outputs(model: RGPR) -> list[str]:
    more = ["score"] if model._references is None else ["score", "p_value"]
    return [*likelihood_named(model.likelihood).answers, *more]


def _example(model: RGPR) -> Tensor:
    """Two rows of the form that the model was fitted on."""
    shape = model._input_shape
    if not isinstance(shape, torch.Size):
        raise ValueError(
            "this model takes several tensors, of which the command does not know the form; use "
            "rgpr.export in Python, with an example"
        )
    dtype = torch.long if model.input is not None else dtype_of(model.posterior.network)
    return torch.zeros(2, *shape, dtype=dtype, device=model._device)
