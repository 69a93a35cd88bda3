"""Text generation with any model that tools.hf can open.

The text is streamed to stdout; speed and memory are printed on stderr.
"""
