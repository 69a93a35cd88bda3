"""Command-line verbs that create files, one module each."""
