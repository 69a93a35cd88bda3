"""Which documents a run's steps saw, and which steps saw a document, by the run's index cache. Builds nothing, reads no .bin."""
