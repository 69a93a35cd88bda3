"""The kernels room: one folder an operation, each with one public function and a plain PyTorch `reference` beside any faster form.

Operations know tensors, not models: nothing of the other rooms but `fem_common` is imported here, no configuration is read, and no process
group is touched. `arguments.operation` is around every public function: torch.autocast changes nothing inside, and float16 is computed in
float32.
"""
