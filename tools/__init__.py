"""Tools for finished runs and for the code itself; each package is one tool."""
