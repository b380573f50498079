"""The data sets of the experiments, read from a folder that the user names.

Nothing is downloaded unless the user asks for it. ``read_split`` gives the training and test part
of a set that networks are trained on, ``read_outliers`` its outliers, ``read_corrupted`` the
published CIFAR-10-C, and ``read_regression`` a table of numbers. Where a set is missing, a
:class:`MissingDataError` names the places that were searched and the command that gets it.

``images.py`` says in which order files are searched; ``sources.py`` knows every set of images by
name and says what is compared with a published hash, ``roles.py`` which set is an outlier to which,
and ``image_set.py`` has what they all return.
"""

from __future__ import annotations

from .corrupted import GET_CIFAR_10_C, read_corrupted
from .image_set import ImageSet, Loader, grey, notes_of, some, three_channels
from .images import read_images
from .missing import MissingDataError
from .outliers import OutlierSource, read_kinds, uniform_noise
from .regression import REGRESSION_SETS, read_regression
from .roles import IN_DISTRIBUTION, digits, read_outliers, read_split
from .sequences import CHANNELS, SequenceData, made_sequences

__all__ = [
    "CHANNELS",
    "GET_CIFAR_10_C",
    "IN_DISTRIBUTION",
    "REGRESSION_SETS",
    "ImageSet",
    "Loader",
    "MissingDataError",
    "OutlierSource",
    "SequenceData",
    "digits",
    "grey",
    "made_sequences",
    "notes_of",
    "read_corrupted",
    "read_images",
    "read_kinds",
    "read_outliers",
    "read_regression",
    "read_split",
    "some",
    "three_channels",
    "uniform_noise",
]
