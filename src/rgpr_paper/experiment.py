"""The contract of an experiment, and the registry that holds all experiments by name.

An experiment has two functions. ``run(context)`` computes units of work, see
:mod:`rgpr_paper.units`, and ``render(folder)`` turns their files, and nothing else, into a
:class:`~rgpr_paper.section.Section`. So a report can be written anew without computing anything.

The package's own experiments are the files of ``rgpr_paper/experiments``: every file of that folder
is imported when the experiments are first asked for, and registers itself. An experiment elsewhere
calls the same :func:`register`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from rgpr._discovery import import_files

from .context import Context

if TYPE_CHECKING:
    from .section import Section

__all__ = ["Experiment", "all_experiments", "import_from", "register", "run_experiment"]

# Words that the command line and the folder of results use for something else.
_TAKEN = ("all", "checkpoints")
_REGISTERED: dict[str, Experiment] = {}


@dataclass(frozen=True)
class Experiment:
    """One table or figure that can be made by name.

    Attributes:
        name: Lower-case words joined by hyphens. It names the experiment on the command line, and
            the folder of its results.
        title: What the experiment shows, as a heading.
        run: Computes the units that have no file yet.
        render: Turns the files in the experiment's folder into a section of the report.
        paper: Labels of the paper's figures and tables that it makes, or ``"ours"``.
        place: Experiments are listed by increasing place, those of the same place by name. Those
            of the paper come in the paper's order, and all without a place after them.
    """

    name: str
    title: str
    run: Callable[[Context], None]
    render: Callable[[Path], Section]
    paper: str = "ours"
    place: float = math.inf

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name) or self.name in _TAKEN:
            raise ValueError(
                f"an experiment cannot be named '{self.name}'; use lower-case words joined by "
                f"hyphens, and none of {', '.join(_TAKEN)}"
            )


def register(experiment: Experiment) -> Experiment:
    """List an experiment, so that it can be run by name and is part of the report.

    Returns:
        The experiment itself.

    Raises:
        ValueError: Another module has registered the same name.
    """
    known = _REGISTERED.get(experiment.name)
    # A notebook's cell that is run again may replace its own experiment.
    if known is not None and known.run.__module__ != experiment.run.__module__:
        raise ValueError(
            f"the experiment '{experiment.name}' is that of {known.run.__module__} already; choose "
            "another name"
        )
    _REGISTERED[experiment.name] = experiment
    return experiment


def all_experiments() -> dict[str, Experiment]:
    """Every registered experiment by name: the package's own, and those of imported modules."""
    package = import_module(".experiments", __package__)
    import_files(package.__name__, package.__path__)
    ordered = sorted(_REGISTERED.values(), key=lambda each: (each.place, each.name))
    return {experiment.name: experiment for experiment in ordered}


def import_from(module: str) -> None:
    """Run a module that registers experiments or detectors of the user's.

    Args:
        module: A module's name, such as ``my_package.my_module``, or the path of a Python file.

    Raises:
        FileNotFoundError: There is no such module or file.
    """
    path = Path(module)
    if path.suffix != ".py":
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and lacks another one
            raise FileNotFoundError(
                f"there is no module {module}; name its file, or install what has it"
            ) from error
        return
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to import")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    # Dataclasses and pickle look up the module of a class by its name.
    sys.modules.setdefault(path.stem, loaded)
    spec.loader.exec_module(loaded)


def run_experiment(name: str, context: Context) -> list[str]:
    """Run what is not there yet, write ``OUT/NAME/NAME.md`` and its figures.

    Where matplotlib is missing, an experiment with figures writes its numbers alone.

    Args:
        name: Name of a registered experiment.
        context: How to run.

    Returns:
        For the units whose data are missing, how to get these data.

    Raises:
        KeyError: There is no such experiment.
        ValueError: Files of a run with other settings are in the way.
    """
    from .report import write_section
    from .units import gaps

    experiment = all_experiments()[name]
    experiment.run(context)
    try:
        write_section(experiment, context.out)
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "cycler"):
            raise
        print(
            f"{name}: the numbers are written, and matplotlib, which draws its figures, is not "
            f"installed; where it is, `rgpr paper report --out {context.out}` makes the page",
            file=sys.stderr,
        )
    return gaps(context.out / name)
