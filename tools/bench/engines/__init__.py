"""``python -m tools.bench.engines``: step time and peak memory of every engine and ZeRO stage.

The results are ratios to the Megatron engine.

`variants` defines the compared engines and launches a variant's ranks, each of which runs `rank`;
`figures` makes a table of the results.
"""
