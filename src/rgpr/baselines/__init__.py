"""Methods to compare with: Gaussian processes on a network's errors, and detectors.

``gp_residual`` needs gpytorch and ``detectors.ViM`` needs pytorch-ood; import what you use.
"""

__all__ = ["detectors", "gp_residual"]
