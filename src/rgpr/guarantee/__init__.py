"""The theorem as something to rely on.

``certificate`` gives a distance beyond which the confidence is provably low, from the bounds in
``bounds`` and ``lipschitz``. ``assumptions`` says which conditions of the theorem a model meets.
"""

from . import lipschitz
from .assumptions import Check
from .certificate import Certificate

__all__ = ["Certificate", "Check", "lipschitz"]
