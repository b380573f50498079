"""Reading data and networks from files, and writing answers to files, for the command line.

``data`` reads arrays, tables and image folders; ``networks`` reads networks and models, and runs
no code that the user did not name; ``answers`` says what is written of each row, ``parts`` writes
it piece by piece so that a killed run goes on, and ``joining`` makes one file of the pieces.
"""
