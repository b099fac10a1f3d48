"""Products of rows with a matrix each group of them has."""
