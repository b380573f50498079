"""A base and its residual together.

``one_pass`` runs the network once and gives the base's outputs and the residual's ``u`` of every
layer: all answers are made of these two. ``fitting`` learns the residual in one pass over the
training data.
"""

from .one_pass import Extension, Reading, together

__all__ = ["Extension", "Reading", "together"]
