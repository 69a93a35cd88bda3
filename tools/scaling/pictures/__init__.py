"""Figures of a study, created from its fit and table without further computation of results."""
