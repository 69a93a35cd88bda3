"""``python -m tools.bench.engines``: step time and peak memory of every engine and ZeRO stage, as ratios to the Megatron engine.

`variants` says what is compared, `launch` starts a variant's ranks, each of which is a `rank`, `figures` makes a table of their answers.
"""
