"""Context parallelism: distribution of sequences over ranks, and reads of other ranks' tokens."""
