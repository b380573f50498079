"""Gradient attacks on a model's confidence and on its score, and what they reach.

``regions.py`` holds the sets that an attacker may move in, ``ascent.py`` projected gradient ascent
in them, ``aims.py`` what an attacker wants, and ``victims.py`` the networks that are attacked.
``near.py``, ``noisy.py`` and ``far.py`` measure one victim each: from test data, from noise, and at
a given distance from the training data. ``page.py`` shows the numbers and ``claims.py`` what
follows from them. :mod:`rgpr_paper.experiments.attacks` puts them together.
"""

from __future__ import annotations
