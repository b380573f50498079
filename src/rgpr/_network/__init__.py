"""Somebody else's network and data: run, read, checked, and left as they were.

``running`` switches modes, puts hooks on for one pass and takes the representations out of it.
``trace`` finds out which layers there are, ``pickers/`` holds the rules that choose among them (add
a file to add one), and ``layers`` makes names of whatever a user chose. ``loaders``, ``outputs``
and ``checks`` read batches and refuse what does not fit. ``moments`` and ``reservoir`` are
statistics of a stream, and ``processes`` merges those of several processes.
"""
