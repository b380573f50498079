"""The library beside others: gpytorch, laplace-torch, pytorch-ood, Ray and scikit-learn.

Nothing is imported here, because each module needs the library it is named after: import the
module that you use.
"""

__all__ = ["gpytorch", "laplace", "pytorch_ood", "ray", "sklearn"]
