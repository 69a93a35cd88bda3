"""Scores of models on tasks: selection of tasks (suite), evaluation with lm-evaluation-harness
(run), tables and pictures (report).
"""
