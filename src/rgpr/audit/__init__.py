"""Reading data, networks and programs from files, and writing answers to files.

``data`` reads arrays, tables and image folders, one file for each form; ``networks`` and
``programs`` read networks and run no code that the user did not name; ``answers`` says what is
known of a batch, ``streaming`` and ``parts`` write it in chunks that a killed run takes up, and
``joining`` makes one file of them; ``graphs`` writes a model with its network inside.
"""
