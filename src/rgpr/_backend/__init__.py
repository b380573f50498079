"""The arithmetic, and nothing else.

``arithmetic`` holds every operation as plain torch, to be read first. ``triton_kernels`` holds the
same operations for GPUs, ``packing`` lays tensors out for them, ``graph_operators`` makes them
parts of compiled graphs, and ``compiled`` keeps such graphs for a model's plain calls.
"""
