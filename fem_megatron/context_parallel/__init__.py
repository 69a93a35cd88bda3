"""Context parallelism of layers: which rank has which tokens, and how reads get other tokens."""
