"""Methods to compare the residual with.

``detectors`` holds detectors of strange inputs, one file each, behind one contract: they give a
score and no probabilities. ``gp_residual`` holds Gaussian processes that are fitted to a network's
errors: these are posteriors like those of :mod:`rgpr.posteriors`, and may carry the residual too.

Nothing is imported here, because ``gp_residual`` needs gpytorch and ``detectors.ViM`` needs
pytorch-ood: import the folder or file that you use.
"""

__all__ = ["detectors", "gp_residual"]
