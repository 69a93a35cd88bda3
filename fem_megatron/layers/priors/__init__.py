"""One file a prior of the Free Energy Mixer: a class that turns its slices of the projection and values into the gated read."""
