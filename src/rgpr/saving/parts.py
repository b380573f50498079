"""A model in pieces that can be written down: tensors by name, and a description in JSON.

``model_file`` writes both into a file, and ``state`` puts them into a ``state_dict``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._network.batches import Shape, shape_from_json, shape_to_json, taken_of
from .._network.representation import Representation
from ..extension import Extension
from ..likelihoods import likelihood_named
from ..posteriors import Posterior
from ..residual.coordinates import Coordinates
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import Residual
from .checks import (
    check_described,
    check_finite,
    check_layers,
    check_learned,
    check_residual,
)

__all__ = ["Parts", "complete", "describe", "part", "put_together"]


@dataclass(frozen=True)
class Parts:
    """All that is kept of a fitted model.

    Attributes:
        extension: The base and its residual.
        recipe: How the residual was made.
        learned: Tensors that a fit or a calibration made, by name.
        columns: Names of the columns, if the model was fitted on a frame.
    """

    extension: Extension
    recipe: ResidualRecipe
    learned: Mapping[str, Tensor]
    columns: tuple[str, ...] | None = None


def describe(parts: Parts) -> dict[str, Any]:
    """All that is no tensor, for JSON."""
    extension, output = parts.extension, parts.extension.posterior.output
    every = [extension.residual.at(index) for index in range(len(extension.layers))]
    return {
        "posterior": extension.posterior.kind,
        "config": extension.posterior.config(),
        "likelihood": extension.likelihood.name,
        "layers": extension.layers,
        "axes": [[each.batch, each.channel, each.token] for each in extension.representations],
        "coordinates": [coordinates.config() for coordinates in every],
        "residual": dataclasses.asdict(parts.recipe),
        "input_shape": shape_to_json(extension.input_shape),
        "nan": extension.nan,
        "input": extension.source,
        # A function cannot be written down: whoever has it puts it back.
        "output": None if callable(output) else output,
        "columns": None if parts.columns is None else list(parts.columns),
    }


def put_together(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module | Posterior, where: Any
) -> Parts:
    """The parts that were described.

    Args:
        about: What :func:`describe` gave.
        tensors: ``posterior.*`` (but the network's), ``layer.<index>.*``, ``residual.*``,
            ``temperature`` and ``learned.*``.
        base: The network, or a posterior that is the right one already.
        where: What they come from, for errors.

    Raises:
        ValueError: Something is missing or is not what a model has, or a posterior of this kind is
            not known here.
    """
    with complete(where):
        posterior = base if isinstance(base, Posterior) else _posterior(about, tensors, base, where)
        check_described(about)
        output = about.get("output")  # files of earlier versions know none
        if output not in (None, posterior.output):
            posterior = posterior.taking(output)  # it may serve other models as it is
        recipe = _recipe_from_json(about["residual"])
        coordinates = [
            Coordinates.from_saved(config, part(tensors, f"layer.{index}."))
            for index, config in enumerate(about["coordinates"])
        ]
        residual = Residual(coordinates, combine=recipe.combine)
        shape, scales = shape_from_json(about["input_shape"]), part(tensors, "residual.")
        _check_order(shape, posterior.network)
        check_residual(residual, scales, shape)
        for name, buffer in list(residual.named_buffers(recurse=False)):
            setattr(residual, name, scales[name].to(buffer))
        learned = part(tensors, "learned.")
        check_learned({**learned, "temperature": tensors["temperature"]}, len(coordinates))
        check_layers(about["layers"], posterior.network)
        extension = Extension(
            posterior,
            residual,
            _representations(about),
            shape,
            likelihood_named(about["likelihood"]),
            tensors["temperature"],
            about["nan"],
        )
        columns = about.get("columns")
        names = None if columns is None else tuple(columns)
    return Parts(extension, recipe, learned, names)


def _check_order(shape: Shape, network: nn.Module) -> None:
    """Refuse parts of an input that stood side by side in another order than they do now."""
    if isinstance(shape, dict) and list(shape) != list(taken_of(network).in_order(shape)):
        raise ValueError(
            f"its inputs have the parts {list(shape)}, in the order in which a dict had them when "
            "an earlier version fitted it; fit the model again, whose order is that of the "
            "network's parameters"
        )


@contextmanager
def complete(where: Any, remedy: str = "save it again") -> Iterator[None]:
    """Turn whatever goes wrong inside into a ``ValueError`` that names what was read.

    Only what was saved is looked at inside, so it is the cause.

    Args:
        where: What was read.
        remedy: What the reader of the error can do.
    """
    try:
        yield
    except KeyError as missing:
        raise ValueError(f"{where} is incomplete: it has no {missing}; {remedy}") from missing
    except ValueError as error:
        if str(where) in str(error):
            raise
        raise ValueError(f"{where} cannot be used: {error}; {remedy}") from error
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{where} is damaged: {type(error).__name__} while it was read ({error}); {remedy}"
        ) from error


def _posterior(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], network: nn.Module, where: Any
) -> Posterior:
    kind = about["posterior"]
    if kind not in Posterior.kinds:
        raise ValueError(
            f"{where} holds a posterior of kind '{kind}', known here: "
            f"{sorted(Posterior.kinds)}; import the module that defines it, or upgrade rgpr"
        )
    own = part(tensors, "posterior.")
    check_finite(own)
    return Posterior.kinds[kind].from_saved(network, about["config"], own)


def _representations(about: Mapping[str, Any]) -> list[Representation]:
    """What is read of the network; files without axes mean the usual ones."""
    raw = [config["of"] == "raw" for config in about["coordinates"]]
    axes = about.get("axes", [[0, 1 if each else None, None] for each in raw])
    pairs = zip(about["layers"], axes, strict=True)
    first, *others = [Representation(name, *own) for name, own in pairs]
    return [dataclasses.replace(first, source=about.get("input")), *others]


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, by the rest of their names."""
    return {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}


def _recipe_from_json(about: dict[str, Any]) -> ResidualRecipe:
    strategies = {name: Strategy(**about[name]) for name in ("input", "hidden")}
    return ResidualRecipe(**{**about, **strategies})
