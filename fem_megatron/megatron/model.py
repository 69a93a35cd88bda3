"""Build this rank's part of a model as Megatron-core GPTModel chunks, with initial weights.

A chunk is the part of the model in one (virtual) pipeline stage. The initial weights do not depend
on the layout (the parallel sizes). The module does not import the trainer or the launcher.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from fem_megatron.config import ModelConfig
from fem_megatron.megatron import fusions, platform
from fem_megatron.megatron.graphs import graph_layers
from fem_megatron.megatron.loss import add_z_loss, sum_in_chunks
from fem_megatron.megatron.mtp import MtpModel
from fem_megatron.megatron.offload import offload
from fem_megatron.megatron.specs import block_spec
from fem_megatron.mup import outer_weights, starts_from
from fem_megatron.shape import Normal

# Largest number of weights drawn concurrently. Each needs host memory for the full float32 weight.
MOST_DRAWN = 8


@dataclass(frozen=True)
class Layout:
    """Distribution of one model over processes, and its precision."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    context_parallel_kind: str | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32
    recompute: str = "none"  # or "selective", "full"
    z_loss: float = 0.0
    loss_chunk: int = 0  # tokens; 0: all
    offload_activations: bool = False
    fp8: str = "none"  # or "tensorwise"
    cuda_graphs: bool = False

    @property
    def overlap_p2p(self) -> bool:
        """True if pipeline sends must be overlapped instead of batched.

        Interleaving over two stages gives wrong results with batched sends, and Megatron-core
        0.16.1 does not detect it.
        """
        return self.virtual_pipeline_model_parallel_size is not None


def _keep_memory(weight: torch.Tensor) -> None:
    """Leave the weight unchanged: Megatron's initialisation hook. `initialize` fills it later."""


def transformer_config(model: ModelConfig, layout: Layout) -> TransformerConfig:
    """Return Megatron's configuration of ``model`` under ``layout`` on this machine."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_size,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Megatron marks a weight as tensor-parallel only when it initialises it, so initialisation
        # stays on with functions that do not change the weight.
        init_method=_keep_memory,
        output_layer_init_method=_keep_memory,
        use_cpu_initialization=not platform.has_cuda(),
        params_dtype=layout.params_dtype,
        bf16=layout.params_dtype == torch.bfloat16,
        pipeline_dtype=layout.params_dtype,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=layout.overlap_p2p,
        batch_p2p_comm=not layout.overlap_p2p,
        recompute_granularity=None if layout.recompute == "none" else layout.recompute,
        recompute_method="uniform" if layout.recompute == "full" else None,
        recompute_num_layers=1 if layout.recompute == "full" else None,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        **platform.transformer_config_overrides(),
        **fusions.config_overrides(layout.params_dtype),
    )


def build(
    model: ModelConfig, layout: Layout, seq_length: int, seed: int, *, draw: bool = True
) -> list[GPTModel]:
    """Return this rank's initialised model chunks on this machine's device.

    The list has one chunk per virtual pipeline stage. Megatron's process groups must exist.

    draw: False fills the randomly initialised weights with NaN instead, see :func:`initialize`.

    Raises:
        ValueError: if the parallel sizes do not divide the model's widths (see
        ``ModelConfig.blocks``).
    """
    config = transformer_config(model, layout)
    stages = (
        [None]
        if layout.virtual_pipeline_model_parallel_size is None
        else range(layout.virtual_pipeline_model_parallel_size)
    )
    split, fp8 = layout.context_parallel_kind, layout.fp8 != "none"
    kind = partial(MtpModel, model=model, split=split, fp8=fp8) if model.mtp_depth else GPTModel
    chunks = []
    for stage in stages:
        chunk = kind(
            config,
            block_spec(model, config, stage, split, fp8=fp8),
            vocab_size=model.padded_vocab_size(),
            max_sequence_length=seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=stage is None, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=stage is None, vp_stage=stage
            ),
            parallel_output=True,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type="none",  # the mixers rotate queries and keys
            vp_stage=stage,
        )
        if chunk.pre_process and model.stream_size > model.hidden_size:
            add_velocities(chunk, seq_length)
        chunk = chunk.to(device=platform.device(), dtype=layout.params_dtype)
        initialize(chunk, model, seed, draw=draw)
        if chunk.post_process:
            assert model.vocab_size is not None
            leave_out_padding(chunk.output_layer, model.vocab_size)
            if layout.z_loss:
                add_z_loss(chunk, layout.z_loss)
            if layout.loss_chunk:
                sum_in_chunks(chunk, layout.loss_chunk)
        if layout.offload_activations:
            offload(chunk.decoder)
        if layout.cuda_graphs:
            graph_layers(chunk.decoder)
        chunks.append(chunk)
    # used only for the width of pipeline messages after this point
    config.hidden_size = model.stream_size * (1 + model.mtp_depth)
    return chunks


def add_velocities(chunk: GPTModel, seq_length: int) -> None:
    """Make the embedding return tokens and velocities, concatenated to [s, b, 2 hidden_size].

    Velocities are the second half of the residual stream in models with momentum. They have a
    separate embedding table.
    """
    embedding, tokens = chunk.embedding, chunk.embedding.forward
    embedding.velocity = LanguageModelEmbedding(
        embedding.config, embedding.vocab_size, seq_length, "none", tp_group=embedding.tp_group
    )

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        return torch.cat((tokens(*given, **named), embedding.velocity(*given, **named)), dim=-1)

    embedding.forward = forward


def leave_out_padding(output_layer: Any, vocab_size: int) -> None:
    """Set the logits of the vocabulary's padding rows to -inf on the ranks that have such rows.

    A softmax gives -inf the weight exp(-inf) = 0, so loss and gradients are bitwise equal to those
    of a model without these rows, in any dtype. This output layer computes every logit, so the
    change applies with and without labels, and with tied or untied embeddings. It is also correct
    on ranks that have only padding rows: both of Megatron's cross-entropies subtract the maximum
    over all ranks, and a rank replaces (does not multiply) its value for a target on another rank.
    """
    rows = output_layer.output_size_per_partition
    kept = min(max(vocab_size - rows * parallel_state.get_tensor_model_parallel_rank(), 0), rows)
    if kept == rows:
        return

    logits = output_layer.forward

    def forward(*given: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        output: tuple[torch.Tensor, Any] = logits(*given, **named)
        # In place and hidden from autograd: a product does not read its output in the backward
        # pass, and the gradient of a finite loss at -inf is already zero. Only padding columns are
        # written.
        output[0].detach()[..., kept:].fill_(-torch.inf)
        return output

    output_layer.forward = forward


def global_name(chunk: GPTModel, name: str) -> str:
    """Return the name in the full model of a parameter of this chunk.

    Layers are numbered over all pipeline stages; a tied output layer has the embedding's name.
    """
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"

    def renumber(match: re.Match[str]) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    return re.sub(r"^decoder\.layers\.(\d+)\.", renumber, name)


def start(name: str, shape: tuple[int, ...], init: float | Normal, seed: int) -> torch.Tensor:
    """Return the initial value of the full weight ``name`` in float32.

    If ``init`` is a number, all elements have this value. Otherwise they are sampled from normal(0,
    init.std) with a generator that is seeded by ``seed`` and the name.
    """
    if isinstance(init, int | float):
        return torch.full(shape, float(init))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, init.std, generator=generator)


@torch.no_grad()
def initialize(chunk: GPTModel, model: ModelConfig, seed: int, *, draw: bool = True) -> None:
    """Fill every randomly initialised weight, with a separate generator for each.

    The generator is seeded by the weight's name in the full model. A rank draws the full weight and
    keeps its slice, so the weights are equal in every layout. Several weights are drawn
    concurrently: as many as torch has threads, at most MOST_DRAWN. Weights that start from a
    constant (norms, beta, a conditioner's last projection) are not changed.

    Afterwards every parameter has an attribute ``spec``, its `shape.Weight`. This includes
    Megatron's own parameters: the embedding, the final norm and the output layer.

    draw: False fills these weights with NaN instead, for a model into which a checkpoint is loaded.
    A weight that the checkpoint does not overwrite then shows as a loss of NaN.
    """
    outer, drawn = outer_weights(model), list[tuple[torch.nn.Parameter, str, Normal]]()
    for name, weight in chunk.named_parameters():
        if not hasattr(weight, "spec"):
            weight.spec = outer[global_name(chunk, name)]
        init = starts_from(model, weight.spec)
        if isinstance(init, int | float):
            continue
        if draw:
            drawn.append((weight, global_name(chunk, name), init))
        else:
            weight.fill_(torch.nan)
    with ThreadPoolExecutor(min(torch.get_num_threads(), MOST_DRAWN)) as threads:
        for done in [threads.submit(_draw, *one, seed) for one in drawn]:
            done.result()


@torch.no_grad()  # no_grad applies only to the calling thread
def _draw(weight: torch.nn.Parameter, name: str, init: Normal, seed: int) -> None:
    """Sample the full weight ``name`` and copy this rank's slice of it into ``weight``."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    split = getattr(weight, "tensor_model_parallel", False)
    dim = weight.partition_dim if split else 0  # type: ignore[attr-defined]
    shape = list(weight.shape)
    shape[dim] *= size if split else 1
    full = start(name, tuple(shape), init, seed)
    weight.copy_(full.chunk(size, dim)[rank] if split else full)
