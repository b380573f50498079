"""The arithmetic, and nothing else.

``arithmetic`` holds every operation in plain torch and the table of faster versions; read it first.
A file or subpackage with the name of a device type, such as ``cuda``, holds faster versions for
that device: they register themselves, and nothing else changes. ``small_layers`` lets a kernel
measure many layers together, and ``compiled`` keeps compiled graphs for the plain calls of a model.
``recording`` replays calls whose small kernels take longer to launch than to run, and
``consistency`` notices when what they were made of was replaced.
``precision`` and ``buffers`` say in which dtype all of this is computed and kept.
"""
