"""Files of users, which the command line reads and writes; nothing of the library needs them.

``inputs`` reads data, one file for each form. ``networks`` reads networks and runs no code that the
user did not name, and writes a model with its network inside. ``outputs`` writes answers in chunks
that a killed run takes up, and makes one file of them.
"""
