"""The experiments of the paper, and ours, that can be run again by name.

``rgpr paper list`` names them, ``rgpr paper run NAME`` runs one or all of them, and ``rgpr paper
report`` shows what the runs left behind beside the paper's numbers. Each file of the folder
``experiments`` is one table or figure; everything else here helps them. ``experiment.py`` has the
contract, ``units.py`` runs and keeps the numbers, ``section.py`` and ``report.py`` show them.
``data`` reads the data sets, ``corruptions`` spoils images, ``training`` and ``networks.py`` train,
and ``methods.py`` has the methods that are compared, by name. ``published`` holds the numbers that
the paper printed.

To add an experiment, write a file with ``run`` and ``render`` that registers an
:class:`Experiment`. In the folder ``experiments`` it is found without being listed anywhere; a file
of your own is named by ``--import`` on the command line, or imported before
:func:`run_experiment`.
"""

from __future__ import annotations

from .context import Context
from .experiment import Experiment, all_experiments, import_from, register, run_experiment

__all__ = [
    "Context",
    "Experiment",
    "all_experiments",
    "import_from",
    "register",
    "run_experiment",
]
