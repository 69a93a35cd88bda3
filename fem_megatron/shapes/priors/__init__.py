"""One file a prior of the Free Energy Mixer: its slices of the packed projection, its cost and its state. Torch-free."""
