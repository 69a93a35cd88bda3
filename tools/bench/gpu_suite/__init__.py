"""``python -m tools.bench.gpu_suite``: correctness and speed of every operation, the trainer and whole models, on one GPU, in minutes.

`plan` lists the tasks in their order, `pool` gives them to processes, each of which is a `worker`; `trainer` runs the trainer, `results`
records the outcomes and `report` makes pages of them. The first process computes nothing on the GPU: a kernel that hangs or breaks its
process costs one result.
"""
