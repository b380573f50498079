"""Pickers: rules that choose layers by looking at a network, one file each.

``model = rgpr.RGPR(network, layers="auto")`` names one of them. A rule of your own is registered by
:func:`register_layer_picker`.
"""

from ..._discovery import import_files
from .base import PICKERS, Picker, register_layer_picker

__all__ = ["PICKERS", "Picker", "register_layer_picker"]

import_files(__name__, __path__)
