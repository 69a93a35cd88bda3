"""Scaling-law studies: from a question to a fitted law with its uncertainty, and to the recommended
run.
"""
