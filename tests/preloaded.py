"""Preload modules in the server from which ranks are forked, so that no rank loads them again.

These are modules that a rank imports on demand, and facts that DeepSpeed finds by starting
compilers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fem_megatron.megatron import upstream
from pretrain.engines.deepspeed_ops import prepare_environment

LAYERS = (
    "attention",
    "cem",
    "delta",
    "differential",
    "energy_transformer",
    "fem",
    "hyperset",
    "mamba2",
    "nrgpt",
    "second_order",
    "yuriiformer",
)
INSIDE = (  # modules that DeepSpeed's engines import at their first start
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
upstream.import_megatron()
for _name in (
    "pytest",  # imported by the test module that contains the function
    *(f"fem_megatron.mixers.{mixer}.layer" for mixer in LAYERS),
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "pretrain.engines.megatron",
    "pretrain.rehearsal.steps",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
):
    import_module(_name)
if find_spec("deepspeed") is not None:
    prepare_environment()
    import_module("deepspeed")
    assert import_module("deepspeed.ops").__compatible_ops__
    for _name in ("pretrain.engines.deepspeed", "deepspeed.ops.adam", *INSIDE):
        import_module(_name)
