"""The theorem as something to rely on.

Far from the training data a model's confidence goes to ``1 / classes``. This folder says how far is
far, and whether that holds for a given model. ``model.certify(eps)`` returns a
:class:`Certificate`: a distance beyond which every input has a confidence of at most
``1 / classes + eps``. It rests on two bounds (``bounds``): one reads the weights of a linear head
(``head``), the other multiplies the Lipschitz constants of the network's parts along its graph
(``lipschitz``, by the entries of ``table``). :func:`rgpr.check` returns a :class:`Check`, a report
on the theorem's assumptions. If your network has a part that the table does not know, the error
names it, and :func:`register_bound` adds it.

To read the code, start with ``certificate``. To add an activation, add one line to ``activations``.
"""

from .assumptions import Check
from .certificate import Certificate
from .operations import Call, NotBoundedError
from .table import register_bound

__all__ = [
    "Call",
    "Certificate",
    "Check",
    "NotBoundedError",
    "register_bound",
]
