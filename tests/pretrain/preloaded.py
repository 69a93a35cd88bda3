"""Modules that a rank of Megatron's engine imports: the ranks' server imports them once."""

from __future__ import annotations

from importlib import import_module

from fem_megatron.megatron import upstream

upstream.import_megatron()
for _name in (
    "tests.ranks",
    "tests.pretrain.jobs",
    "pretrain.run",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "pretrain.engines.megatron",
):
    import_module(_name)
