"""Demo: one command that runs the complete pipeline, from text to a Hugging Face model.

It starts the commands of the other packages and reads their output files; it reimplements none of
their work.
"""
