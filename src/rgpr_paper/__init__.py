"""The paper's experiments, one module for each figure or table.

``rgpr paper list`` names them, ``rgpr paper run NAME`` runs one or all of them, and ``rgpr paper
report`` shows what the runs left behind beside the paper's numbers. To add one: a module with
``run`` and ``render`` as :mod:`rgpr_paper.experiment` describes them, and a line below.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiment import Context

__all__ = ["EXPERIMENTS", "Experiment", "run_experiment"]


@dataclass(frozen=True)
class Experiment:
    """What the list says about an experiment.

    Attributes:
        title: What it shows.
        paper: The figure or table of the paper that it makes, by its label there.
    """

    title: str
    paper: str


EXPERIMENTS = {
    "construction": Experiment(
        "The kernel as the limit of ReLU features", "fig:double_cubicspline_gps"
    ),
    "moons": Experiment("Overconfidence far away, on two moons", "fig:asymp_overconfidence"),
    "contours": Experiment("The residual's variance around two moons", "fig:kernel_contours"),
    "tuning": Experiment("Objectives for tuning the residual's scales", "fig:tuning"),
    "toy-regression": Experiment("Toy regression", "fig:toy_reg"),
    "uci": Experiment("Error bars of regression, near and far", "tab:ood_reg_faraway"),
    "far-away": Experiment("Confidence against the distance from the data", "fig:exp_far_away"),
    "far-away-noise": Experiment("Far-away noise, more bases than one", "tab:ood_faraway"),
    "rotated-mnist": Experiment("Rotated MNIST", "fig:dataset_shift"),
    "corrupted-cifar10": Experiment("Corrupted CIFAR-10", "fig:dataset_shift, tab:cifar10c"),
    "detection": Experiment(
        "Outliers found and calibration kept, all methods on the same networks",
        "tab:ood_avg, tab:ood_hyperopt, tab:ood_auroc_auprc, tab:acc_ece, tab:calib_ood",
    ),
    "non-bayesian": Experiment("Against non-Bayesian detectors", "tab:ood_non_bayesian"),
    "optimal-scales": Experiment("Scales that tuning finds", "tab:opt_hyperparams"),
    "natural-images": Experiment("Natural images as outliers for tuning", "tab:ood_imagenet"),
    "two-answers": Experiment("Probabilities and score of the default, near and far", "ours"),
    "small-data": Experiment("The default with 30 to 300 validation examples", "ours"),
}


def module_of(name: str) -> Any:
    """The experiment's module."""
    return import_module(f".{name.replace('-', '_')}", __name__)


def run_experiment(name: str, context: Context) -> list[str]:
    """Run what is not there yet, write ``OUT/NAME/NAME.md`` and its figures.

    Args:
        name: One of ``EXPERIMENTS``.
        context: How to run.

    Returns:
        For the units whose data are missing, what gets them.

    Raises:
        ValueError: Files of a run with other settings are in the way.
    """
    from .experiment import gaps
    from .report import write_section

    module_of(name).run(context)
    write_section(name, context.out)
    return gaps(context.out / name)
