"""``python -m tools.bench.gpu_suite``: test one GPU in minutes.

The suite measures correctness and speed of every operation, the trainer and complete models.

`plan` lists the tasks in their order. `pool` distributes the tasks to processes, each of which runs
`worker`. `trainer` runs the trainer, `results` records the outcomes, and `report` writes the pages
with the results. The main process does not compute on the GPU, so that a kernel that hangs or
breaks its process costs only one result.
"""
