"""Write, find, verify and read checkpoints, and resume runs from them."""
