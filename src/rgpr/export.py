"""The whole model as one graph: network, base posterior, residual and probit.

What comes out needs neither this library nor laplace-torch to run. The batch is dynamic.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .model import RGPR
from .posteriors import Ensemble, SampledPosterior, Temperature
from .storage import replacing

__all__ = ["onnx", "program"]


class _Predict(nn.Module):
    """The default call alone: probabilities by the probit, or mean and covariance."""

    def __init__(self, model: RGPR) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def program(model: RGPR, example: Tensor) -> torch.export.ExportedProgram:
    """The model as a ``torch.export`` program, for any batch size.

    Args:
        model: A fitted model.
        example: An input batch; its values do not matter.

    Raises:
        RuntimeError: The model was not fitted.
        TypeError: The base predicts by random samples, or through another library's object.
    """
    model._fitted()
    _check(model)
    if len(example) < 2:
        # A batch of one would be taken for a constant.
        example = torch.cat([example, example])
    module = _Predict(model)
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            return torch.export.export(
                module.eval(),
                (example.detach(),),
                dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
                strict=False,
            )
    finally:
        for part, training in modes.items():
            part.training = training


def onnx(model: RGPR, path: str | os.PathLike[str], example: Tensor) -> Path:
    """Write the model as an ONNX file, atomically.

    The graph has the input ``x`` and the output ``probabilities``, or for regression ``mean`` and
    ``covariance``.

    Args:
        model: A fitted model.
        path: The file.
        example: An input batch; its values do not matter.

    Returns:
        The path.
    """
    names = ["probabilities"] if model.likelihood == "classification" else ["mean", "covariance"]
    with replacing(path) as temporary:  # a folder that is not there is refused before the work
        exported = program(model, example)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names of dynamic dimensions
            graph = torch.onnx.export(
                exported, dynamo=True, input_names=["x"], output_names=names, verbose=False
            )
        assert graph is not None
        graph.optimize()
        graph.save(temporary)
    return Path(path)


def _check(model: RGPR) -> None:
    base: Any = model.posterior
    while isinstance(base, Temperature):
        base = base.base
    if isinstance(base, SampledPosterior) and not isinstance(base, Ensemble):
        raise TypeError(
            f"a {type(base).__name__} predicts by random samples, which a graph does not hold; "
            "export a model over the network itself, its last-layer Laplace, or an ensemble"
        )
    if base.kind is None:
        raise TypeError(
            f"a {type(base).__name__} predicts through an object of another library, which cannot "
            "be exported; export a model over the network itself or its last-layer Laplace"
        )
