"""The theorem as something to rely on.

``certificate`` gives a distance beyond which the confidence is provably low, from the bounds in
``bounds`` and ``lipschitz``. ``assumptions`` says which conditions of the theorem a model meets.
"""
