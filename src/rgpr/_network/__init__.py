"""Somebody else's network and data: run, watched, checked, and left as they were.

``running`` switches modes and puts hooks on for one pass, ``trace`` and ``layers`` find out which
layers there are and choose among them, ``capture`` hands their outputs over. ``loaders`` and
``checks`` read batches and refuse what does not fit. ``moments`` and ``reservoir`` are statistics
of a stream, and ``processes`` merges those of several processes.
"""
