"""What every implementation of an operation must get right: one module an operation, `SUITE` in each; for tests and the GPU suite."""
