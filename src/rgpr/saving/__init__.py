"""A model outside of this process: one safetensors file, or one graph for ONNX and torch.export.

``model_file`` says what of a model is written and how it is put together again, ``container`` how
tensors and JSON share one file, ``export`` how the model becomes a graph.
"""

from . import export

__all__ = ["export"]
