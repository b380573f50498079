"""A base and its residual together: how the one is fitted to the other, in one pass over data."""
