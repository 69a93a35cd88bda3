"""Compute the memory of one rank in bytes from the configuration alone.

The module does not import torch. The terms were found by measurement of this code.

Static memory per parameter (Megatron-core): weights 2 (bf16) or 4 (fp32); gradients 4, always
accumulated in fp32; optimizer 8 for Adam's two moments (4 for Muon's single moment) and, only in
bf16, 4 for the fp32 main weights. In fp32 the main weights are the weights themselves, also with
the distributed optimizer. The distributed optimizer divides the optimizer part by the data-parallel
size.

The table lists the bytes per token that autograd keeps of one layer. Its symbols are:

    e             bytes of the training precision; terms with a factor 4 are always fp32
    D, t          hidden size, tensor-parallel size
    s             t under sequence parallelism, else 1
    P, q, d, F    widths of the packed projection, the queries, the values and the MLP, divided by t
    k, d_k        width of the keys, divided by t; width of a key of one head
    w, o          widths of the values that the attention reads and of its output, divided by t
    H_c           width of the conditioner
    L, G          options of the FEM mixer (`fem_megatron.mixers.fem.shape`); its tensors mu, F, Z,
                  lambda, g, beta, c, v and U are defined in `fem_megatron.mixers.fem.layer` and
                  `kernels.fem_attention.accelerated`

    norms         e 2D/s         the inputs of the two RMSNorms
                  (on a CPU, unfused: 4 * 4D/s, input and normalised input in fp32)
    projection    e D/s          the input of in_proj, gathered again in the backward pass;
                  e D if in_proj has a bias or shares the input with a conditioner's LayerNorm
    conditioner   e (D + H_c) + 4 (5/t + 4) H_c
                  inputs of its two projections, the operands of the scan and of the norms
    scaling       e 2P           z and 1 + phi, the factors of the conditioned projection
    rope          e 2 d_k / b    cosines and sines of q and k, once for b sequences of a micro-batch
    qk_norm       4 (q + k + 1 per head), in bf16 4 (q + k) more
                  q and k over their root mean squares, and fp32 copies; fused: the numbers per head
                  and the inputs of the norms, if no other term includes them (model.qk_norm)
    attention     e (q + q + w + o) + 4 heads
                  q, k, the values (2d: [v | U]), the output, the row sums; on a CPU padded to one
                  width; with a window also the copies of q, k and v that its query blocks read
    packed        e P            the entire projection, if a view into it is kept: the g-logit,
                  or v if the attention reads v itself
    gates         e d + e d      lambda, + 4d for its fp32 copy in bf16; g before its RMS norm
                  (fp32 on a CPU), + 4d for g itself
    prep          4 * 2d         x = beta (v - c) and the stream's slope (L)
    epilogue      4 * 4d         mu - c, the factors of Z and mu, and F - mu (L);
                  + 4d for o before the outer gate (G)
    out_proj      e d            its input (in fp32 without L and G this is the attention's output)
    MLP           e (D/s + 4F)   its input; gate and up, silu(gate), their product

The table covers the FEM over the softmax prior, attention and the SwiGLU MLP. It is implemented by
their shapes (``Shape.kept_bytes``), on a GPU for every prior (``PriorShape.read_bytes``). The
memory of every other mixer is estimated from measurements per channel of its width (``Kept``), made
on a CPU or with a GPU's kernels, and the plan reports that it is an estimate. On a GPU the peak is
within 15% of the rehearsed peak (tests/pretrain/test_rehearsal.py).

Effects of the training options:

- train.recompute = selective: an MLP keeps only its input, and the attention only its arguments. On
  a CPU an estimate does not change, so it is too high.
- train.fp8: a linear map keeps its input in 8 bits, for the full sequence, in addition to other
  copies of the input. Estimates do not change.
- train.cuda_graphs: the workspace includes the memory of the graphs (`pretrain.plan.graphs`).
  Activations do not change.
- train.offload_activations: the activations of all layers but one are on the host. On a CPU, host
  and device memory are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fem_common.text import gib
from fem_megatron.shape import ESTIMATE, WIDE, BlockShape, Training
from pretrain.config import EngineConfig, RunConfig
from pretrain.plan.graphs import graph_bytes
from pretrain.plan.muon import ROUND, TENSORS
from pretrain.plan.zero_memory import variants, zero_memory

RANKS_OF_A_NODE = 8


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
    # Bytes of host memory: offloaded DeepSpeed tensors and offloaded activations of the layers.
    host: int = 0
    # Bytes by which the sum exceeds the peak: DeepSpeed's gradients appear while activations are
    # freed.
    apart: int = 0
    # Number of parameters with only one moment in the optimizer.
    muons: int = 0

    @property
    def total(self) -> int:
        """Peak bytes on the device, without the host's memory."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
            - self.apart
        )


def stage_memory(
    config: RunConfig,
    stage: int,
    parameters: int,
    data_parallel: int,
    *,
    cuda: bool,
    muons: int = 0,
) -> StageMemory:
    """Return the memory of one rank of a pipeline stage.

    parameters: number of parameters of the rank. muons: number of these that Muon updates.
    """
    layout, bf16 = config.parallel, config.train.precision == "bf16"
    if config.engine.name == "deepspeed":
        return _zero_stage_memory(
            config, config.engine, parameters, data_parallel, cuda=cuda, muons=muons
        )
    ranks = data_parallel * layout.context_parallel_size
    sharded = -(-parameters // ranks) if layout.use_distributed_optimizer else parameters
    single = -(-muons // ranks) if layout.use_distributed_optimizer else muons
    activations = stage_activations(config, stage, data_parallel, cuda=cuda)
    # After the activations are freed, gloo reduces and scatters a copy of all gradients, which
    # exists until the weights are gathered (CPU). AdamW is fused and makes no temporaries.
    step = WIDE * parameters if layout.use_distributed_optimizer and not cuda else 0
    step = max(step, TENSORS * _element(config) * min(ROUND, single)) + copied_weights(
        config, parameters, data_parallel
    )
    graphs = graph_bytes(
        config, _residual(config) * config.train.micro_batch_size * _own_length(config)
    )
    return StageMemory(
        stage=stage,
        parameters=parameters,
        weights=parameters * (2 if bf16 else 4),
        gradients=parameters * WIDE,
        optimizer=sharded * (12 if bf16 else 8) - WIDE * single,
        activations=activations,
        workspace=max(backward_workspace(config, stage, cuda=cuda), step - activations) + graphs,
        host=offloaded_activations(config, stage, data_parallel, cuda=cuda),
        muons=muons,
    )


def copied_weights(config: RunConfig, parameters: int, data_parallel: int) -> int:
    """Return the bytes that `TensorNorms` uses for its copy of a rank's fp32 weights."""
    if not config.log.diagnostics_interval or "tensors" not in config.log.diagnostics:
        return 0
    split = (
        config.engine.zero_stage > 0
        if config.engine.name == "deepspeed"
        else config.parallel.use_distributed_optimizer
    )
    return WIDE * (
        -(-parameters // (data_parallel * config.parallel.context_parallel_size))
        if split
        else parameters
    )


def _zero_stage_memory(
    config: RunConfig,
    engine: EngineConfig,
    parameters: int,
    data_parallel: int,
    *,
    cuda: bool,
    muons: int,
) -> StageMemory:
    kept = zero_memory(config, engine, parameters, data_parallel, cuda=cuda, muons=muons)
    copy = copied_weights(replace(config, engine=engine), parameters, data_parallel)
    there = "host" if engine.offload_optimizer and cuda else "reduction"
    kept = replace(kept, **{there: getattr(kept, there) + copy})
    activations = stage_activations(config, 0, data_parallel, cuda=cuda)
    workspace = backward_workspace(config, 0, cuda=cuda)
    sizes = (kept.weights, kept.gradients, kept.optimizer, activations, workspace + kept.workspace)
    return StageMemory(
        stage=0,
        parameters=parameters,
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        activations=activations,
        workspace=workspace + kept.workspace,
        host=kept.host + offloaded_activations(config, 0, data_parallel, cuda=cuda),
        apart=sum(sizes) - kept.peak(activations + workspace),
        muons=muons,
    )


def zero_variants(
    config: RunConfig, own: StageMemory, data_parallel: int, *, cuda: bool
) -> dict[str, StageMemory]:
    """Return name -> memory of every ZeRO stage and offload that the run could use.

    own: memory of the run itself, which contains the numbers of parameters of the rank.
    """
    rank = {"parameters": own.parameters, "data_parallel": data_parallel, "muons": own.muons}
    return {
        name: _zero_stage_memory(config, engine, **rank, cuda=cuda)
        for name, engine in variants(config)
    }


def layer_activations(config: RunConfig, block: BlockShape, *, cuda: bool) -> dict[str, float]:
    """Return term -> bytes per token that autograd keeps of one layer on one rank.

    The terms are those of the table above.
    """
    e, split, training = _element(config), _sequence_split(config), training_of(config, cuda=cuda)
    again = training.again
    norms = {"norms": (e if cuda else WIDE * 2) * config.model.hidden_size / split}
    terms: dict[str, float] = {}
    for shape in filter(None, (block.mixer, block.mlp)):
        kept = (
            norms | shape.kept_bytes(training)
            if shape is block.mixer or not again
            else {"MLP": _residual(config)}
        )
        for name, value in kept.items():
            terms[name] = terms.get(name, 0.0) + block.recurrence * value
    return terms


def training_of(config: RunConfig, *, cuda: bool) -> Training:
    """Return the training settings in the form that the methods of shapes require."""
    layout, train = config.parallel, config.train
    return Training(
        element=_element(config),
        tensor_parallel=layout.tensor_model_parallel_size,
        sequence_split=_sequence_split(config),
        micro_batch=train.micro_batch_size,
        length=config.data.seq_length,
        cuda=cuda,
        again=train.recompute == "selective",
        ranks=layout.context_parallel_size,
        fp8=train.fp8 != "none",
    )


def is_estimated(config: RunConfig, *, cuda: bool) -> bool:
    """Return True if the activations of the model are an estimate.

    This is the case if a mixer or MLP of the model is not covered by the table above.
    """
    return any(
        ESTIMATE in layer_activations(config, block, cuda=cuda) for block, _ in config.model.kinds
    )


def head_activations(config: RunConfig, *, cuda: bool) -> dict[str, float]:
    """Return term -> bytes per token that autograd keeps on the last stage after the layers.

    The terms are the final norm, the output layer and the loss.
    """
    e, hidden, s = _element(config), config.model.hidden_size, _sequence_split(config)
    softmax = WIDE * config.model.padded_vocab_size() / config.parallel.tensor_model_parallel_size
    return {
        "final norm": (e if cuda else WIDE * 2) * hidden / s,
        "output layer": e * hidden / s,  # its input, or with train.loss_chunk the input's gradient
        "softmax": 0.0 if config.train.loss_chunk else softmax,
    }


def chunks_in_flight(config: RunConfig, stage: int, data_parallel: int) -> int:
    """Return the largest number of forward passes of a model chunk whose backward pass is pending.

    The schedules are Megatron's 1F1B and interleaved schedules.
    """
    layout, train = config.parallel, config.train
    stages = layout.pipeline_model_parallel_size
    chunks = layout.virtual_pipeline_model_parallel_size or 1
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel)
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, micro_batches * chunks)


def stage_activations(config: RunConfig, stage: int, data_parallel: int, *, cuda: bool) -> int:
    """Return the bytes of activations on a rank of ``stage`` at the peak.

    These are the activations of its layers for every micro-batch in flight. On the last stage, the
    activations of the loss are added.
    """
    stages = config.parallel.pipeline_model_parallel_size
    per_token = (
        0.0
        if _offloads(config, cuda=cuda)
        else _layers_activations(config, stage, data_parallel, cuda=cuda)
    )
    if stages > 1:
        per_token += chunks_in_flight(config, stage, data_parallel) * _residual(config)
    if stage == stages - 1:
        per_token += sum(head_activations(config, cuda=cuda).values())
    return int(per_token * config.train.micro_batch_size * _own_length(config))


def offloaded_activations(config: RunConfig, stage: int, data_parallel: int, *, cuda: bool) -> int:
    """Return the bytes of layer activations that a rank of ``stage`` keeps on the host at the peak.

    They are 0 without train.offload_activations.
    """
    per_token = (
        _layers_activations(config, stage, data_parallel, cuda=cuda)
        if _offloads(config, cuda=cuda)
        else 0.0
    )
    return int(per_token * config.train.micro_batch_size * _own_length(config))


def _layers_activations(config: RunConfig, stage: int, data_parallel: int, *, cuda: bool) -> float:
    """Return the bytes per token of a rank's layer activations for all micro-batches in flight."""
    layout, layers = config.parallel, 0.0
    for block, count in config.model.kinds:
        again = config.train.recompute == "full"
        layers += count * (
            _residual(config)
            if again
            else sum(layer_activations(config, block, cuda=cuda).values())
        )
    parts = layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)
    return chunks_in_flight(config, stage, data_parallel) * layers / parts


def _offloads(config: RunConfig, *, cuda: bool) -> bool:
    """Return True if activations are offloaded from a GPU to the host.

    On a CPU, device and host memory are the same.
    """
    return config.train.offload_activations and cuda


def _residual(config: RunConfig) -> float:
    """Return the bytes per token of the residual stream on one rank."""
    return _element(config) * config.model.stream_size / _sequence_split(config)


def beside_told(
    config: RunConfig,
    memory: Sequence[StageMemory],
    world_size: int,
    data_parallel: int,
    *,
    cuda: bool,
) -> Iterator[str]:
    """Yield lines about memory that the table of all stages does not show separately.

    These are the offloaded activations, and the copy of the weights for tensor norms, which the
    table includes.
    """
    ranks = min(world_size, RANKS_OF_A_NODE)
    sizes = [
        offloaded_activations(config, stage.stage, data_parallel, cuda=cuda) for stage in memory
    ]
    if any(sizes):
        node = f"{gib(ranks * max(sizes))} a node of {ranks} ranks"
        yield (
            f"  activations on the host: {gib(max(sizes))} a rank, {node}; page-locked memory is "
            "allocated in powers of two, so it may be up to twice that"
        )
    if size := copied_weights(config, max(stage.parameters for stage in memory), data_parallel):
        yield (
            f"  log.diagnostics includes tensors: at those steps {gib(size)} more after the "
            "backward pass, for a copy of the weights that the rank updates"
        )


def backward_workspace(config: RunConfig, stage: int, *, cuda: bool) -> int:
    """Return the bytes of short-lived tensors at the peak of the backward pass.

    On the last stage, the peak is the backward pass of the loss or, after the tensors of the loss
    have been freed, that of a layer. On other stages it is that of a layer.

    Loss: in bf16 the logits in addition to their fp32 softmax, and the weight gradient of the
    output layer before it is added to the fp32 buffer. With train.loss_chunk both passes run
    together, one chunk at a time: the logits and softmax of the chunk, or their gradient and its
    weight gradient, in addition to the accumulated weight gradient and all hidden states.

    Layer: the gradients inside its MLP or its mixer, the weight gradient of fc1, and the temporary
    memory of its mixer (``Shape.moment_bytes``). Recompute adds the activations of the layer that
    are computed again. On a CPU, bf16 adds the size of all its activations.
    """
    model = config.model
    train = config.train
    e = _element(config)
    t = config.parallel.tensor_model_parallel_size
    tokens = train.micro_batch_size * _own_length(config)
    inner, packed = model.ffn_size / t, max(_packed_width(block) for block, _ in model.kinds) / t
    per_token = (
        e * 3 * max(inner, packed)
        if cuda
        else e * max(5 * inner, 4 * packed) + e * 2 * model.hidden_size
    )
    # Recompute makes the missing activations of a layer again. On a CPU in bf16 the fp32 parts of a
    # layer have fp32 gradients of about the size of its activations (measured, not derived).
    plain = replace(config, train=replace(train, recompute="none"))
    whole = max(
        sum(layer_activations(plain, block, cuda=cuda).values()) for block, _ in model.kinds
    )
    kept = {
        "none": whole,
        "selective": min(
            sum(layer_activations(config, block, cuda=cuda).values()) for block, _ in model.kinds
        ),
        "full": 0.0,
    }
    per_token += (
        whole
        - (0.0 if _offloads(config, cuda=cuda) else kept[train.recompute])
        + (e < WIDE and not cuda) * whole
    )
    layer = per_token * tokens + e * 2 * inner * model.hidden_size
    layer += max(
        block.mixer.moment_bytes(training_of(config, cuda=cuda)) for block, _ in model.kinds
    )
    if stage < config.parallel.pipeline_model_parallel_size - 1:
        return int(layer)
    rows = model.padded_vocab_size() / t
    if train.loss_chunk:
        some, copied = min(train.loss_chunk, tokens), WIDE * (e < WIDE)
        loss = (
            rows
            * (max((e + copied) * some, e * (some + model.hidden_size)) + WIDE * model.hidden_size)
            + _residual(config) * tokens
        )
    else:
        # Megatron's fused loss (on a GPU in bf16) turns the softmax into its gradient in place.
        wide = 0 if cuda and not train.z_loss else WIDE
        loss = (
            rows * (e + wide) * (e < WIDE) + e * model.hidden_size
        ) * tokens + e * rows * model.hidden_size
    return int(max(loss, layer - sum(head_activations(config, cuda=cuda).values()) * tokens))


def _packed_width(block: BlockShape) -> int:
    """Return the number of channels of the mixer's widest linear map."""
    return max(
        (max(weight.shape) for weight in block.mixer.weights().values() if len(weight.shape) == 2),
        default=0,
    )


def _element(config: RunConfig) -> int:
    return 2 if config.train.precision == "bf16" else 4


def _own_length(config: RunConfig) -> int:
    """Return the number of tokens of a sequence on one context-parallel rank."""
    return config.data.seq_length // config.parallel.context_parallel_size


def _sequence_split(config: RunConfig) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
