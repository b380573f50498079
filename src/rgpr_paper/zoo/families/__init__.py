"""The files of this folder register the entries of the zoo, one file for each family."""
