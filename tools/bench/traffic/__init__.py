"""``python -m tools.bench.traffic``: bytes that a layer moves through a GPU's memory, and its step on paper, without a GPU.

``trace`` runs the real layers on tensors without numbers and counts; ``paper`` makes times of the counts.
"""
