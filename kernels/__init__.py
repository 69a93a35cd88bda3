"""Kernels: one folder for each operation, with one public function, a plain PyTorch `reference` and
faster implementations.

Operations work on tensors, not on models: this package imports `fem_common` and no other package of
the project, reads no configuration and uses no process group. The decorator `arguments.operation`
is on every public function: torch.autocast has no effect inside, and float16 is computed in
float32.
"""
