"""The whole model as one graph: network, base posterior, residual, probabilities and score.

What comes out needs neither this library nor laplace-torch to run. The batch is dynamic.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._atomic import replacing
from .._network.batches import Batch, first_part, mapped, named, rows_of
from .._network.guards import evaluating
from ..likelihoods import likelihood_named
from ..posteriors import Posterior

__all__ = ["Model", "check_exportable", "onnx", "program"]


class Model(Protocol):
    """What an export asks of a model: :class:`rgpr.RGPR` is one."""

    posterior: Posterior
    nan: str
    _references: Tensor | None

    @property
    def likelihood(self) -> str:
        """What the outputs are."""

    @property
    def layers(self) -> list[str]:
        """Names of the representations; there are none before the fit, which is an error."""

    def forward(self, x: Any) -> Any:
        """What a plain call returns."""

    def _everything(self, x: Any) -> Any:
        """That, the score and, of a calibrated model, the p-value, from one pass."""

    def _say(self, x: Any) -> Any:
        """What one pass says: all that answers are made of."""


class _Predict(nn.Module):
    """The default call alone: probabilities by the probit, or mean and covariance."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model.forward(x)  # and not a compiled call


class _Everything(_Predict):
    """That, the score and, of a calibrated model, the p-value, from one pass."""

    def forward(self, x: Any) -> Any:
        return self.model._everything(x)


class _Said(_Predict):
    """All that answers are made of; see :class:`rgpr.answers.predictions.Said`."""

    def forward(self, x: Any) -> Any:
        return self.model._say(x).tensors


_MODULES = {"call": _Predict, "everything": _Everything, "said": _Said}


def program(
    model: Model, example: Batch, *, dynamic: bool = True, everything: bool = False
) -> torch.export.ExportedProgram:
    """The model as a ``torch.export`` program.

    Args:
        model: A fitted model.
        example: An input batch; its values do not matter. The program takes batches of its form,
            with sequences of its length.
        dynamic: For any batch size, instead of that of the example alone.
        everything: Return the score, and the p-value of a calibrated model, beside what a plain
            call returns.

    Raises:
        RuntimeError: The model was not fitted.
        TypeError: The base predicts by random samples, or through another library's object.
    """
    return program_of("everything" if everything else "call", model, example, dynamic=dynamic)


def program_of(
    what: str, model: Model, example: Batch, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """One of the functions that a model has as a program; see :func:`program`.

    Args:
        what: ``"call"``, ``"everything"``, or ``"said"`` for all that answers are made of.
        model: A fitted model.
        example: An input batch.
        dynamic: For any batch size.
    """
    check_exportable(model)
    if rows_of(example) < 2 and dynamic:
        # A batch of one would be taken for a constant.
        example = mapped(example, lambda part: part.new_zeros(2, *part.shape[1:]))
    # On a GPU some operations take no more than 65535 rows, and a named dimension would be refused.
    on_gpu = first_part(example).is_cuda
    batch = torch.export.Dim.DYNAMIC if on_gpu else torch.export.Dim("batch")
    module = _MODULES[what](model)
    with torch.no_grad(), evaluating(module) as modes, modes:
        return torch.export.export(
            module,
            (mapped(example, Tensor.detach),),
            dynamic_shapes={"x": mapped(example, lambda _: {0: batch})} if dynamic else None,
            strict=False,
        )


def onnx(model: Model, path: str | os.PathLike[str], example: Batch) -> Path:
    """Write the model as an ONNX file, atomically.

    The graph has the input ``x``, or the parts of the input by their names, and the outputs
    ``probabilities`` (for regression ``mean`` and ``covariance``), ``score`` and, of a
    calibrated model, ``p_value``.

    Args:
        model: A fitted model.
        path: The file.
        example: An input batch; its values do not matter.

    Returns:
        The path.
    """
    names = list(likelihood_named(model.likelihood).answers)
    names += ["score"] if model._references is None else ["score", "p_value"]
    if isinstance(example, Tensor):
        given = ["x"]
    elif isinstance(example, Mapping):
        given = list(example)  # the graph's inputs come in this order, whatever the parameters'
    else:
        given = list(named(model.posterior.network, example))
    with replacing(path) as temporary:  # a folder that is not there is refused before the work
        exported = program(model, example, everything=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names of dynamic dimensions
            graph = torch.onnx.export(
                exported, dynamo=True, input_names=given, output_names=names, verbose=False
            )
        assert graph is not None
        graph.optimize()
        _cut_constants(graph.model)
        graph.save(temporary)
    return Path(path)


def _cut_constants(model: Any) -> None:
    """Store only the part of a constant that a graph uses, where it uses one part alone.

    Torch's own optimisation leaves large constants whole. Prototypes hold their axes a second time,
    beside products that the graph uses alone.
    """
    from onnxscript import optimizer

    def cuts(node: Any) -> bool | None:
        whole = node.inputs[0] if node.op_type == "Slice" else None
        return True if whole is not None and len(whole.uses()) == 1 else None

    optimizer.fold_constants(model, should_fold=cuts)
    optimizer.remove_unused_nodes(model)


def check_exportable(model: Model) -> None:
    """Refuse a model that was not fitted, or that a graph cannot hold."""
    model.layers  # noqa: B018, which refuses a model that was not fitted
    if model.nan == "raise":
        raise TypeError("nan='raise' looks at values, which a graph cannot; use nan='propagate'")
    reason = model.posterior.no_graph
    if reason is not None:
        raise TypeError(
            f"a {type(model.posterior).__name__} cannot become a graph: {reason}; export a model "
            "over the network itself, its last-layer Laplace, or an ensemble"
        )
