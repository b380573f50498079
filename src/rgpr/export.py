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

from .data import check_input
from .model import RGPR
from .posteriors import Ensemble, SampledPosterior, Temperature
from .storage import replacing

__all__ = ["CompiledCall", "onnx", "program"]


class _Predict(nn.Module):
    """The default call alone: probabilities by the probit, or mean and covariance."""

    def __init__(self, model: RGPR) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model.forward(x)  # and not a compiled call


def program(model: RGPR, example: Tensor, *, dynamic: bool = True) -> torch.export.ExportedProgram:
    """The model as a ``torch.export`` program.

    Args:
        model: A fitted model.
        example: An input batch; its values do not matter.
        dynamic: For any batch size, instead of that of the example alone.

    Raises:
        RuntimeError: The model was not fitted.
        TypeError: The base predicts by random samples, or through another library's object.
    """
    model._fitted()
    _check(model)
    if len(example) < 2 and dynamic:
        # A batch of one would be taken for a constant.
        example = torch.cat([example, example])
    # On a GPU some operations take no more than 65535 rows, and a named dimension would be refused.
    batch = torch.export.Dim.DYNAMIC if example.is_cuda else torch.export.Dim("batch")
    module = _Predict(model)
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            return torch.export.export(
                module.eval(),
                (example.detach(),),
                dynamic_shapes={"x": {0: batch}} if dynamic else None,
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


class CompiledCall:
    """A model's default predictions as one compiled graph; see :meth:`RGPR.compile`.

    Hooks, which read the representations, would cut a graph into pieces, so the model is exported
    first. The graph holds the model's own tensors; it is made anew when the model got others.

    Args:
        model: A fitted model.
        options: What ``torch.compile`` is given.
    """

    def __init__(self, model: RGPR, options: dict[str, Any]) -> None:
        model._fitted()
        _check(model)
        self._model, self._options = model, options
        self._graphs: dict[int | None, Any] = {}
        self._made_of: int | None = None

    def __call__(self, x: Tensor, **options: Any) -> Any:
        model = self._model
        if options or (torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad):
            return model._call_impl(x, **options)  # type: ignore[no-untyped-call]
        check_input(x, model.posterior.network, model._input_shape)
        if self._made_of != model._changes:
            self._graphs, self._made_of = {}, model._changes
        # As torch.compile does: a graph for the first size of a batch, and one for all others.
        size = len(x) if not self._graphs or len(x) in self._graphs else None
        if size not in self._graphs:
            graph = program(model, x, dynamic=size is None).module()
            self._graphs[size] = torch.compile(graph, **self._options)
        return self._graphs[size](x)


def _check(model: RGPR) -> None:
    if model.nan == "raise":
        raise TypeError("nan='raise' looks at values, which a graph cannot; use nan='propagate'")
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
