"""What a run needs, from its configuration alone: parameters, FLOPs, memory. No torch."""
