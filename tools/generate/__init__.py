"""Text generation with any model.

The text is streamed to stdout; speed and memory are printed on stderr.

Models are opened by tools.hf.
"""
