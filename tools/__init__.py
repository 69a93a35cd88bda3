"""Tools for finished runs and for the code itself; each package is one tool."""

# Before the packages that a tool imports: it reports one that is not installed.
from fem_common import cli as cli
