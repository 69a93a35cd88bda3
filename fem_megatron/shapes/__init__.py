"""Torch-free sizes: for each mixer its weights, products, state and limits, from the configuration. No tensor may come in.

One table serves all: the layers make their parameters from it, the plan counts it, the export checks against it.
"""
