"""Commands for checkpoints as files: inspect, verify, convert, merge and mirror them. No model is
built and no tensor is computed, except by ``merge``.
"""
