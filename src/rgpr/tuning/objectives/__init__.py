"""What tuning can maximise, one file each behind the contract of ``base``.

The paper has three: the likelihood of validation data, the same with outliers, and the marginal
likelihood. One of your own is a subclass of :class:`Objective`, or of :class:`PerExample` if it is
a mean over the examples; giving it a ``name`` is what registers it.
"""

from ..._discovery import import_files
from .base import OBJECTIVES, Data, Objective
from .per_example import PerExample

__all__ = ["OBJECTIVES", "Data", "Objective", "PerExample"]

import_files(__name__, __path__)
