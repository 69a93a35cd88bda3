"""Memory of one rank from the configuration alone, in bytes. No torch: the terms are those that this code path was seen to keep.

Static, per parameter (Megatron-core): weights 2 (bf16) or 4 (fp32); gradients 4, always accumulated in fp32; optimizer 8 for Adam's moments
and, in bf16 only, 4 for the fp32 main weights (in fp32 the main weights are the weights, with the distributed optimizer too), divided by
the data-parallel size under the distributed optimizer.

What autograd keeps of one layer, per token (e: bytes of the training precision; D hidden; t: tensor-parallel size; s: t under sequence
parallelism, else 1; per rank: P packed projection width, q query width, d value width, F MLP width, all / t; H_c conditioner width).
Numbers marked 4 are fp32 in either precision.

    norms         e 2D/s         the inputs of the two RMSNorms (on a CPU, unfused: 4 * 4D/s, input and normalised input in fp32)
    projection    e D            the input of in_proj, gathered once under SP; shared by the conditioner's LayerNorm
    conditioner   e (D + H_c) + 4 (5/t + 4) H_c    inputs of its two projections, the scan's and the norms' operands
    scaling       e 2P           z and 1 + phi, the factors of the conditioned projection
    rope          e 2 d_k / b    cosines and sines for q and k, once for the b sequences of a micro-batch
    attention     e (q + q + w + o) + 4 heads      q, k, the values (2d: [v | U]), the output, the row sums; on a CPU padded to one width;
                  with a window also the copies of q, k and v that its blocks of queries read
    packed        e P            the whole projection, where a view into it is kept: the g-logit, or v where the attention reads v itself
    gates         e d + e d      lambda, + 4d for its fp32 copy in bf16; g before its RMS norm (fp32 on a CPU), + 4d for g itself
    prep          4 * 2d         x = beta (v - c) and the stream's slope (L)
    epilogue      4 * 4d         mu - c, Z's and mu's factors and F - mu (L); + 4d for o before the outer gate (G)
    out_proj      e d            its input (in fp32 with neither L nor G it is the attention's output)
    MLP           e (D/s + 4F)   its input; gate and up, silu(gate), their product

The table is of the FEM over the softmax prior, of attention and of the SwiGLU MLP. Every other mixer is estimated from what it was seen to
keep for each channel of its width (``_KEPT``), and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionShape, window_blocks
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemMlpShape
from fem_megatron.mixers.delta.shape import DeltaShape
from fem_megatron.mixers.differential.shape import DifferentialShape
from fem_megatron.mixers.fem.prior_shapes import AftShape, SoftmaxShape
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.mixers.hyperset.shape import HyperSetShape
from fem_megatron.mixers.mamba2.shape import Mamba2Shape
from fem_megatron.mixers.second_order.shape import EnergyLinearShape, SecondOrderShape
from fem_megatron.shape import BlockShape, Shape, SwiGluShape
from pretrain.config import EngineConfig, RunConfig
from pretrain.plan.zero_memory import variants, zero_memory

WIDE = 4  # bytes of fp32

# Bytes a token and channel of hidden_size that autograd keeps of one application, in fp32 and in bf16 training, its norm aside: seen on
# a CPU at the default switches, at widths of 256 and 512 and lengths of 64 and 256, within 25% of each other.
_KEPT: dict[type, tuple[float, float]] = {
    AftShape: (87.0, 68.0),
    CemAttentionShape: (46.0, 32.0),
    CemMlpShape: (25.0, 18.0),
    SecondOrderShape: (35.0, 34.0),
    EnergyLinearShape: (32.0, 28.0),
    HyperSetShape: (101.0, 79.0),
    DifferentialShape: (49.0, 32.0),
    DeltaShape: (101.0, 78.0),
    Mamba2Shape: (67.0, 44.0),
}
_KEPT_OTHER = (90.0, 70.0)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one rank of a pipeline stage needs."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    host: int = 0  # of the machine's memory, beside the device's: what DeepSpeed offloads
    apart: int = 0  # of these, what is gone when others come: DeepSpeed's gradients follow the activations

    @property
    def total(self) -> int:
        """The peak, without the host's."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace - self.apart


def stage_memory(config: RunConfig, stage: int, parameters: int, data_parallel: int, *, cuda: bool) -> StageMemory:
    """Memory of a rank of pipeline stage ``stage`` that holds ``parameters`` parameters."""
    layout, bf16 = config.parallel, config.train.precision == "bf16"
    if config.engine.name == "deepspeed":
        return _zero_stage_memory(config, config.engine, parameters, data_parallel, cuda=cuda)
    sharded = -(-parameters // data_parallel) if layout.use_distributed_optimizer else parameters
    activations = stage_activations(config, stage, data_parallel, cuda=cuda)
    # When the activations are gone: torch's multi-tensor Adam makes one fp32 temporary of all it updates (GPU); gloo reduces and scatters
    # a copy of all gradients, which lives until the weights are gathered (CPU).
    step = WIDE * (sharded if cuda else parameters if layout.use_distributed_optimizer else 0)
    return StageMemory(
        stage=stage,
        parameters=parameters,
        weights=parameters * (2 if bf16 else 4),
        gradients=parameters * WIDE,
        optimizer=sharded * (12 if bf16 else 8),
        activations=activations,
        workspace=max(backward_workspace(config, stage, cuda=cuda), step - activations),
    )


def _zero_stage_memory(config: RunConfig, engine: EngineConfig, parameters: int, data_parallel: int, *, cuda: bool) -> StageMemory:
    kept = zero_memory(config, engine, parameters, data_parallel, cuda=cuda)
    activations, workspace = stage_activations(config, 0, data_parallel, cuda=cuda), backward_workspace(config, 0, cuda=cuda)
    sizes = (kept.weights, kept.gradients, kept.optimizer, activations, workspace + kept.workspace)
    return StageMemory(
        stage=0,
        parameters=parameters,
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        activations=activations,
        workspace=workspace + kept.workspace,
        host=kept.host,
        apart=sum(sizes) - kept.peak(activations + workspace),
    )


def zero_variants(config: RunConfig, parameters: int, data_parallel: int, *, cuda: bool) -> dict[str, StageMemory]:
    """The memory of every ZeRO stage and offload that the run could have, by name."""
    return {name: _zero_stage_memory(config, engine, parameters, data_parallel, cuda=cuda) for name, engine in variants(config)}


def layer_activations(config: RunConfig, block: BlockShape, *, cuda: bool) -> dict[str, float]:
    """Bytes a token that autograd keeps of one layer on one rank, by term (the table above)."""
    terms: dict[str, float] = {}
    for shape in filter(None, (block.mixer, block.mlp)):
        for name, value in _update_activations(config, shape, cuda=cuda).items():
            terms[name] = terms.get(name, 0.0) + block.recurrence * value
    return terms


def is_estimated(model: ModelConfig) -> bool:
    """Whether a mixer or an MLP of the model is outside the table, so that its activations are an estimate."""
    shapes = [shape for block in model.blocks() for shape in (block.mixer, block.mlp) if shape is not None]
    return not all(isinstance(shape, SwiGluShape | AttentionShape) or _is_fem_softmax(shape) for shape in shapes)


def _is_fem_softmax(shape: Shape) -> bool:
    return isinstance(shape, FemShape) and isinstance(shape.prior, SoftmaxShape)


def _update_activations(config: RunConfig, shape: Shape, *, cuda: bool) -> dict[str, float]:
    """Terms of one mixer or MLP, its norm included."""
    e, hidden, s = _element(config), config.model.hidden_size, _sequence_split(config)
    t = config.parallel.tensor_model_parallel_size
    norms = {"norms": (e if cuda else WIDE * 2) * hidden / s}
    if isinstance(shape, SwiGluShape):
        kept = 3 if cuda else 4  # a GPU's fused kernel keeps the packed product and its own output, not silu(a) beside them
        return norms | {"MLP": e * (hidden / s + kept * shape.inner / t)}
    if isinstance(shape, AttentionShape):
        return norms | _attention_terms(config, shape)
    if isinstance(shape, FemShape) and isinstance(shape.prior, SoftmaxShape):
        return norms | _fem_terms(config, shape, shape.prior.qk_head, cuda=cuda)
    return norms | {"estimate": _estimate(config, shape)}


def _fem_terms(config: RunConfig, shape: FemShape, qk_head: int, *, cuda: bool) -> dict[str, float]:
    model, e, t = config.model, _element(config), config.parallel.tensor_model_parallel_size
    hidden, value = model.hidden_size, shape.value_size / t
    packed, query = shape.heads * shape.head_width / t, shape.heads * qk_head / t
    narrow = e < WIDE
    read = value * (2 if shape.free_energy else 1)
    if not cuda:
        query, unpadded, read = max(query, read), read, max(query, read)
    reads_packed_values = not shape.free_energy and (cuda or read == unpadded)
    terms = {
        "projection": e * hidden,
        "rope": e * 2 * qk_head / config.train.micro_batch_size if model.rope else 0.0,
        "attention": e * (2 * query + read + (0 if reads_packed_values else read)) + WIDE * shape.heads / t,
        "packed": e * packed if shape.gate or reads_packed_values or (cuda and shape.free_energy) else 0.0,
        "gates": shape.temperature * (e + WIDE * narrow) * value + shape.gate * ((e if cuda else WIDE) + WIDE) * value,
        "out_proj": e * value if shape.free_energy or shape.gate or narrow else 0.0,
    }
    if shape.conditioner:
        terms["conditioner"] = e * (hidden + shape.conditioner) + WIDE * (5 / t + 4) * shape.conditioner
        terms["scaling"] = e * 2 * packed
    if shape.free_energy and not cuda:  # a GPU's kernels keep v, which lies in the packed product, and the attention's own output
        terms["prep"] = WIDE * 2 * value
        terms["epilogue"] = WIDE * (4 + shape.gate) * value
    elif not shape.free_energy and shape.gate and narrow:
        terms["epilogue"] = WIDE * value
    return terms


def _attention_terms(config: RunConfig, shape: AttentionShape) -> dict[str, float]:
    e, t = _element(config), config.parallel.tensor_model_parallel_size
    query, keys = shape.heads * shape.head / t, shape.groups * shape.head / t
    shared = 2 * query if shape.groups < shape.heads else keys  # k and v repeated for the group's queries, or k rotated, v read in place
    blockwise, read = 0.0, query
    length = config.data.seq_length
    if shape.window is not None and shape.window < length:
        block, blocks = window_blocks(length - shape.window, shape.window)
        near, far = shape.window / length, block * blocks / length
        shared *= near if shape.groups < shape.heads else 1
        blockwise = far * query + 2 * query * blocks * (block + shape.window) / length  # copies: each block's q, its window's k and v
        read = (near + far) * query
    return {
        "projection": e * config.model.hidden_size,
        "rope": e * 2 * shape.head / config.train.micro_batch_size if shape.rope else 0.0,
        "attention": e * (query + read + shared + blockwise) + WIDE * shape.heads / t,
        "packed": e * shape.groups * shape.group_width / t if shape.groups == shape.heads else 0.0,
        "out_proj": e * query if e < WIDE or blockwise else 0.0,
    }


def _estimate(config: RunConfig, shape: Shape) -> float:
    """Bytes a token of a mixer or MLP outside the table: what was seen at its default switches (``_KEPT``), by width."""
    kind = shape.prior if isinstance(shape, FemShape) else shape
    fp32, bf16 = _KEPT.get(type(kind), _KEPT_OTHER)
    kept = (fp32 if _element(config) == WIDE else bf16) * config.model.hidden_size
    if isinstance(shape, CemMlpShape):
        kept += _element(config) * (3 * shape.switches.steps_mlp + 1) * shape.inner
    whole = _element(config) * config.model.hidden_size  # what every rank has entered
    return whole + max(0.0, kept - whole) / config.parallel.tensor_model_parallel_size


def head_activations(config: RunConfig, *, cuda: bool) -> dict[str, float]:
    """Bytes a token that autograd keeps of the final norm, the output layer and the loss on one rank of the last stage."""
    e, hidden, s = _element(config), config.model.hidden_size, _sequence_split(config)
    return {
        "final norm": (e if cuda else WIDE * 2) * hidden / s,
        "output layer": e * hidden / s,
        "softmax": WIDE * config.model.padded_vocab_size() / config.parallel.tensor_model_parallel_size,
    }


def chunks_in_flight(config: RunConfig, stage: int, data_parallel: int) -> int:
    """Forward passes of a model chunk whose backward pass is still to come, at most (Megatron's 1F1B and interleaved schedules)."""
    layout, train = config.parallel, config.train
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel)
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, micro_batches * chunks)


def stage_activations(config: RunConfig, stage: int, data_parallel: int, *, cuda: bool) -> int:
    """Bytes kept on a rank of ``stage`` at the peak: its layers' for every micro-batch in flight, and on the last stage the loss's."""
    layout, train = config.parallel, config.train
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    residual = _element(config) * config.model.hidden_size / _sequence_split(config)
    layers = 0.0
    for block in config.model.blocks():
        layers += residual if train.recompute == "full" else sum(layer_activations(config, block, cuda=cuda).values())
    in_flight = chunks_in_flight(config, stage, data_parallel)
    per_token = in_flight * (layers / (stages * chunks) + (residual if stages > 1 else 0))
    if stage == stages - 1:
        per_token += sum(head_activations(config, cuda=cuda).values())
    return int(per_token * train.micro_batch_size * config.data.seq_length)


def backward_workspace(config: RunConfig, stage: int, *, cuda: bool) -> int:
    """Bytes of short-lived tensors at the peak, which is the loss's backward pass (last stage) or, the loss's tensors gone, a layer's.

    Loss: in bf16 the logits beside their fp32 softmax, and the output layer's weight gradient before it is added to the fp32 buffer.
    Layer: the gradients inside its MLP or its mixer, fc1's weight gradient, under recompute its own activations, in bf16 as much again.
    """
    model, train, e, t = config.model, config.train, _element(config), config.parallel.tensor_model_parallel_size
    tokens = train.micro_batch_size * config.data.seq_length
    inner, packed = model.ffn_size / t, max(_packed_width(block) for block in model.blocks()) / t
    per_token = e * max(5 * inner, 4 * packed) + e * 2 * model.hidden_size
    # Under recompute a layer's activations are made again; in bf16 its fp32 parts have fp32 gradients, about as much (seen, not derived).
    again = (train.recompute == "full") + (e < WIDE)
    per_token += again * max(sum(layer_activations(config, block, cuda=cuda).values()) for block in model.blocks())
    layer = per_token * tokens + e * 2 * inner * model.hidden_size
    if stage < config.parallel.pipeline_model_parallel_size - 1:
        return int(layer)
    rows = model.padded_vocab_size() / t
    loss = (rows * (e + WIDE) * (e < WIDE) + e * model.hidden_size) * tokens + e * rows * model.hidden_size
    return int(max(loss, layer - sum(head_activations(config, cuda=cuda).values()) * tokens))


def _packed_width(block: BlockShape) -> int:
    """Channels of the mixer's widest linear map."""
    return max((max(weight.shape) for weight in block.mixer.weights().values() if len(weight.shape) == 2), default=0)


def _element(config: RunConfig) -> int:
    return 2 if config.train.precision == "bf16" else 4


def _sequence_split(config: RunConfig) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
