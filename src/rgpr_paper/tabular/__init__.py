"""Small tables: their rows and strange rows, the detectors that look for those, and the measures.

``rows.py`` reads and splits the sets, ``detectors.py`` fits everything that ranks rows,
``classification.py`` and ``regression.py`` measure one set with one seed, and ``page.py`` shows the
numbers. :mod:`rgpr_paper.experiments.tabular` puts them together.
"""

from __future__ import annotations
