"""Evaluation of models on tasks: suites select the tasks (suite), lm-evaluation-harness computes
the scores (run), and a report shows them as tables and figures (report).
"""
