"""``python -m tools.bench.engines``: step time and peak memory of every engine and ZeRO stage.

The results are ratios to the Megatron engine with its distributed optimizer.

`variants` defines the compared engines (variants), `runs` trains each of them with
``python -m pretrain``, and `figures` makes a table of the results.
"""
