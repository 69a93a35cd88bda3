"""What a rank imports when it needs it, and what DeepSpeed finds out by starting compilers: the ranks' server does it once, for all."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fem_megatron.megatron import platform
from pretrain.engines.deepspeed_ops import prepare_environment

platform.import_megatron()
for _name in (
    "fem_megatron.mixers.fem.layer",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "pretrain.engines.megatron",
    "torch.profiler._cupti_monitor",
):
    import_module(_name)
if find_spec("deepspeed") is not None:
    prepare_environment()
    import_module("deepspeed")
    assert import_module("deepspeed.ops").__compatible_ops__
    for _name in ("pretrain.engines.deepspeed", "deepspeed.ops.adam"):
        import_module(_name)
