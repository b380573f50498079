"""Which axis of a tensor holds the channels: the module that made it says so, or who reads it.

Convolutions, their normalisations and poolings put channels second; linear layers, embeddings,
attention, recurrent layers and layer normalisation put them last. What a module does is read off
its attributes (``out_channels``, ``out_features``, ...), so that layers of other libraries and
quantised ones are known too. A normalisation with a ``forward`` of its own may work on either axis:
the one that is as wide as its weights.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["says", "usual"]

# What modules call the number of their channels, and on which axis those are.
_AXES = {
    "out_channels": 1,
    "out_features": -1,
    "embedding_dim": -1,
    "embed_dim": -1,
    "hidden_size": -1,
}
# The same of normalisations.
_NORMALISED = {"num_features": 1, "num_channels": 1, "normalized_shape": -1}


def says(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """The axis on which a module without others inside it has its channels.

    Args:
        module: The module.
        shape: Shape of its output or of its input, the batch first, with three axes at least.

    Returns:
        1 or -1, or ``None`` if the module works on any axis, as an activation does.
    """
    if type(module).__module__ == nn.modules.pooling.__name__:
        return 1
    for name, axis in _AXES.items():
        if isinstance(getattr(module, name, None), int):
            return axis
    weight = getattr(module, "weight", None)
    wide = [a for a in (1, -1) if isinstance(weight, Tensor) and weight.shape == (shape[a],)]
    for name, axis in _NORMALISED.items():
        if hasattr(module, name):
            several = name == "normalized_shape" and len(module.normalized_shape) > 1  # type: ignore[arg-type]
            of_torch = type(module).forward in _FORWARDS
            if several or (len(wide) == 2 and not of_torch):
                return None
            return axis if axis in wide or not wide else wide[0]
    return wide[0] if len(wide) == 1 else None


_FORWARDS = {
    kind.forward
    for kind in (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.InstanceNorm1d, nn.RMSNorm)
}


def usual(shape: tuple[int, ...]) -> int:
    """Where channels are if nothing is known: last in a sequence, second in an image."""
    return -1 if len(shape) == 3 else 1
