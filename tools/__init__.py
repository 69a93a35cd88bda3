"""Tools over finished runs, one room each."""
