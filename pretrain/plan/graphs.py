"""Checks and memory of CUDA graphs (train.cuda_graphs), from the configuration alone.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from pretrain.config import RunConfig
from pretrain.plan.placement import blocks_by_mixer

# Hidden states that a layer's graph owns: its input and the gradients of its input and output.
_OWN = 3
# Key, the value that graphs need, and the reason.
_NEEDED = (
    (
        "engine.name",
        "megatron",
        "DeepSpeed keeps gradients in memory that the replay of the next micro-batch overwrites",
    ),
    ("parallel.pipeline_model_parallel_size", 1, "a graph supports one micro-batch in flight"),
    (
        "parallel.context_parallel_size",
        1,
        "graphs do not support the exchange between context-parallel ranks yet",
    ),
    ("train.recompute", "none", "a graph keeps all its tensors until the end of the run"),
    ("train.offload_activations", False, "the activations of a graph cannot be moved"),
    (
        "data.documents",
        "joined",
        "separate documents have different sizes in every micro-batch",
    ),
    (
        "data.reset_positions",
        False,
        "a graph always uses the positions with which it was captured",
    ),
)


def check_graphs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield an error text for each setting that CUDA graphs of layers do not support.

    Each text names the nearest valid setting.
    """
    if not config.train.cuda_graphs:
        return
    for key, wanted, why in _NEEDED:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if (value or False) != wanted:  # null is false
            yield (
                f"train.cuda_graphs = true: {why}; set {key}={_written(wanted)}, or "
                "train.cuda_graphs=false"
            )
    for name, block in blocks_by_mixer(config.model).items():
        if reason := block.mixer.uncapturable():
            yield (
                f"train.cuda_graphs = true: {name}: {reason}; take another mixer (model.*), or "
                "train.cuda_graphs=false"
            )


def graph_bytes(config: RunConfig, hidden_state: float) -> int:
    """Return the additional bytes that CUDA graphs use on a rank until the end of the run.

    They include the memory of weight gradients. The result is 0 without CUDA graphs.

    hidden_state: bytes of the hidden state of a micro-batch.
    """
    if not config.train.cuda_graphs:
        return 0
    ranks = config.parallel.tensor_model_parallel_size
    element = 2 if config.train.precision == "bf16" else 4
    gradients = 0.0
    for block, count in config.model.kinds:
        for weight in block.weights().values():
            gradients += element * count * weight.size / (1 if weight.split is None else ranks)
    return int(gradients + _OWN * config.model.num_layers * hidden_state)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
