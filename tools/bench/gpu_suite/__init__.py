"""``python -m tools.bench.gpu_suite``: correctness and speed of every operation, then whole models, on one GPU, in a few minutes.

`plan` says what is to be done and in which order, `pool` has processes do it, each of which is a `worker`, `report` makes tables of it.
The first process computes nothing on the GPU: a kernel that hangs or breaks its process costs that one number.
"""
