"""The experiments, one file each; every file in this folder is one.

A file computes its numbers in ``run``, shows them in ``render``, and registers both under a name at
its end. Its docstring says which table or figure of the paper it makes and how it differs from the
paper. Files that several experiments share live one folder up.
"""
