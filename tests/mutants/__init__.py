"""Mutants: one-line faults that measure which share of faults the tests detect."""

from tests.mutants.mutant import ROOT, Mutant, probed, read_mutants

__all__ = ["ROOT", "Mutant", "probed", "read_mutants"]
