"""Reporting of a run: loggers, metrics, progress file, slow ranks and evaluations."""
