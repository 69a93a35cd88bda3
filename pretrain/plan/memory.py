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
their shapes (``Shape.activation_bytes``), on a GPU for every prior (``PriorShape.read_bytes``). The
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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fem_common.costs import Memory
from fem_common.text import gib
from fem_megatron.shape import ESTIMATE, WIDE, BlockShape
from pretrain.plan.graphs import graph_bytes
from pretrain.plan.muon import ROUND, TENSORS
from pretrain.plan.placement import Placement
from pretrain.plan.zero_memory import variants, zero_memory

RANKS_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class StageMemory(Memory):
    """Bytes that one rank of a pipeline stage needs.

    parameters, muon_parameters: numbers of parameters of the rank, and of those that Muon updates.
    host: bytes of host memory: offloaded DeepSpeed tensors and offloaded activations of the layers.
    not_at_peak: bytes by which the sum exceeds the peak, because DeepSpeed's gradients appear while
        activations are freed.
    """

    stage: int
    parameters: int
    muon_parameters: int = 0
    host: int = 0
    not_at_peak: int = 0

    @property
    def total(self) -> int:
        """Peak bytes on the device, without the host's memory."""
        return super().total - self.not_at_peak


def stages_memory(
    placement: Placement, counts: Iterable[tuple[int, int]]
) -> tuple[StageMemory, ...]:
    """Return the memory of one rank of each pipeline stage.

    counts: for each stage, the numbers of parameters of the rank and of those that Muon updates.
    """
    if placement.config.engine.name == "deepspeed":
        return tuple(_zero_stage_memory(placement, *numbers) for numbers in counts)
    layer = _layer_workspace(placement)
    return tuple(
        _stage_memory(placement, stage, layer, *numbers) for stage, numbers in enumerate(counts)
    )


def _stage_memory(
    placement: Placement, stage: int, layer: float, parameters: int, muon_parameters: int
) -> StageMemory:
    """Return the memory of one rank of a pipeline stage under Megatron.

    layer: see `_backward_workspace`.
    parameters, muon_parameters: numbers of parameters of the rank, and of those that Muon updates.
    """
    config = placement.config
    sharded = placement.optimizer_part(parameters)
    single = placement.optimizer_part(muon_parameters)
    activations = stage_activations(placement, stage)
    # After the activations are freed, gloo reduces and scatters a copy of all gradients, which
    # exists until the weights are gathered (CPU). AdamW is fused and makes no temporaries.
    copied = config.parallel.use_distributed_optimizer and not placement.cuda
    step = max(
        WIDE * parameters if copied else 0, TENSORS * placement.element * min(ROUND, single)
    ) + copied_weights(placement, parameters)
    graphs = graph_bytes(config, placement.stream_bytes * placement.micro_batch_tokens)
    return StageMemory(
        weights=parameters * placement.element,
        gradients=parameters * WIDE,
        optimizer=sharded * (12 if placement.element < WIDE else 8) - WIDE * single,
        activations=activations,
        workspace=max(_backward_workspace(placement, stage, layer), step - activations) + graphs,
        stage=stage,
        parameters=parameters,
        muon_parameters=muon_parameters,
        host=offloaded_activations(placement, stage),
    )


def copied_weights(placement: Placement, parameters: int) -> int:
    """Return the bytes that `TensorNorms` uses for its copy of a rank's fp32 weights."""
    log = placement.config.log
    if not log.diagnostics_interval or "tensors" not in log.diagnostics:
        return 0
    return WIDE * placement.optimizer_part(parameters)


def _zero_stage_memory(placement: Placement, parameters: int, muon_parameters: int) -> StageMemory:
    kept = zero_memory(placement, parameters, muon_parameters)
    copy = copied_weights(placement, parameters)
    if placement.config.engine.offload_optimizer and placement.cuda:
        kept = replace(kept, host=kept.host + copy)
    else:
        kept = replace(kept, reduction=kept.reduction + copy)
    activations = stage_activations(placement, 0)
    backward = _backward_workspace(placement, 0, _layer_workspace(placement))
    needed = StageMemory(
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        activations=activations,
        workspace=backward + kept.workspace,
        stage=0,
        parameters=parameters,
        muon_parameters=muon_parameters,
        host=kept.host + offloaded_activations(placement, 0),
    )
    return replace(needed, not_at_peak=needed.total - kept.peak(activations + backward))


def zero_variants(placement: Placement, own: StageMemory) -> dict[str, StageMemory]:
    """Return name -> memory of every ZeRO stage and offload that the run could use.

    own: memory of the run itself, which contains the numbers of parameters of the rank.
    """
    return {
        name: _zero_stage_memory(
            replace(placement, config=replace(placement.config, engine=engine)),
            own.parameters,
            own.muon_parameters,
        )
        for name, engine in variants(placement.config)
    }


def layer_activations(placement: Placement, block: BlockShape) -> dict[str, float]:
    """Return term -> bytes per token that autograd keeps of one layer on one rank.

    The terms are those of the table above.
    """
    training = placement.training
    terms: dict[str, float] = {}
    for part, shape in block.parts.items():
        if training.again and part == "mlp":
            kept = {"MLP": placement.stream_bytes}
        else:
            kept = {"norms": _norm_activations(placement)} | shape.activation_bytes(training)
        for name, value in kept.items():
            terms[name] = terms.get(name, 0.0) + block.times(part) * value
    return terms


def _norm_activations(placement: Placement) -> float:
    """Return the bytes per token that an RMS norm keeps; on a CPU it is unfused."""
    element = placement.element if placement.cuda else WIDE * 2
    return element * placement.config.model.hidden_size / placement.training.sequence_split


def is_estimated(placement: Placement) -> bool:
    """Return True if the activations of the model are an estimate.

    This is the case if a mixer or MLP of the model is not covered by the table above.
    """
    kinds = placement.config.model.kinds
    return any(ESTIMATE in layer_activations(placement, block) for block, _ in kinds)


def head_activations(placement: Placement) -> dict[str, float]:
    """Return term -> bytes per token that autograd keeps on the last stage after the layers.

    The terms are the final norm, the output layer and the loss.
    """
    model, training = placement.config.model, placement.training
    softmax = WIDE * model.padded_vocab_size() / training.tensor_parallel
    return {
        "final norm": _norm_activations(placement),
        # Its input, or with train.loss_chunk the input's gradient.
        "output layer": placement.element * model.hidden_size / training.sequence_split,
        "softmax": 0.0 if placement.config.train.loss_chunk else softmax,
    }


def mtp_activations(placement: Placement) -> float:
    """Return the bytes per token that autograd keeps of the modules of multi-token prediction.

    A module keeps its two normed inputs, their concatenation, its block and its loss. Under
    train.recompute=full it keeps its inputs and its loss.
    """
    model, training = placement.config.model, placement.training
    if not model.mtp_depth:
        return 0.0
    kept = 2.0 * placement.stream_bytes
    if placement.config.train.recompute != "full":
        kept += 2.0 * _norm_activations(placement)
        kept += placement.element * 2 * model.hidden_size / training.tensor_parallel
        kept += sum(layer_activations(placement, model.mtp.block).values())
    return model.mtp_depth * (kept + sum(head_activations(placement).values()))


def chunks_in_flight(placement: Placement, stage: int) -> int:
    """Return the largest number of forward passes of a model chunk whose backward pass is pending.

    The schedules are Megatron's 1F1B and interleaved schedules.
    """
    layout, micro_batches = placement.config.parallel, placement.micro_batches
    stages = layout.pipeline_model_parallel_size
    chunks = layout.virtual_pipeline_model_parallel_size or 1
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, micro_batches * chunks)


def stage_activations(placement: Placement, stage: int) -> int:
    """Return the bytes of activations on a rank of ``stage`` at the peak.

    These are the activations of its layers for every micro-batch in flight. On the last stage, the
    activations of the loss are added.
    """
    stages = placement.config.parallel.pipeline_model_parallel_size
    offloaded = placement.offloads_activations
    per_token = 0.0 if offloaded else _layers_activations(placement, stage)
    if stages > 1:
        message = (1 + placement.config.model.mtp_depth) * placement.stream_bytes
        per_token += chunks_in_flight(placement, stage) * message
    if stage == stages - 1:
        per_token += sum(head_activations(placement).values()) + mtp_activations(placement)
    return int(per_token * placement.micro_batch_tokens)


def offloaded_activations(placement: Placement, stage: int) -> int:
    """Return the bytes of layer activations that a rank of ``stage`` keeps on the host at the peak.

    They are 0 without train.offload_activations.
    """
    if not placement.offloads_activations:
        return 0
    return int(_layers_activations(placement, stage) * placement.micro_batch_tokens)


def _layers_activations(placement: Placement, stage: int) -> float:
    """Return the bytes per token of a rank's layer activations for all micro-batches in flight."""
    layout, layers = placement.config.parallel, 0.0
    for block, count in placement.config.model.kinds:
        if placement.config.train.recompute == "full":
            layers += count * placement.stream_bytes
        else:
            layers += count * sum(layer_activations(placement, block).values())
    parts = layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)
    return chunks_in_flight(placement, stage) * layers / parts


def additional_lines(
    placement: Placement, memory: Sequence[StageMemory], world_size: int
) -> Iterator[str]:
    """Yield lines about memory that the table of all stages does not show separately.

    These are the offloaded activations, and the copy of the weights for tensor norms, which the
    table includes.
    """
    ranks = min(world_size, RANKS_OF_A_NODE)
    offloaded = max(offloaded_activations(placement, stage.stage) for stage in memory)
    if offloaded:
        yield (
            f"  activations on the host: {gib(offloaded)} a rank, {gib(ranks * offloaded)} a node "
            f"of {ranks} ranks; page-locked memory is allocated in powers of two, so it may be up "
            "to twice that"
        )
    if size := copied_weights(placement, max(stage.parameters for stage in memory)):
        yield (
            f"  log.diagnostics includes tensors: at those steps {gib(size)} more after the "
            "backward pass, for a copy of the weights that the rank updates"
        )


def _backward_workspace(placement: Placement, stage: int, layer: float) -> int:
    """Return the bytes of short-lived tensors at the peak of the backward pass.

    layer: the result of `_layer_workspace`, which is the same for every stage.

    On the last stage, the peak is the backward pass of the loss or, after the tensors of the loss
    have been freed, that of a layer. On other stages it is that of a layer.

    Loss: in bf16 the logits in addition to their fp32 softmax, and the weight gradient of the
    output layer before it is added to the fp32 buffer. With train.loss_chunk both passes run
    together, one chunk at a time: the logits and softmax of the chunk, or their gradient and its
    weight gradient, in addition to the accumulated weight gradient and all hidden states.

    Layer: the gradients inside its MLP or its mixer, the weight gradient of fc1, and the temporary
    memory of its mixer (``Shape.workspace_bytes``). Recompute adds the activations of the layer
    that are computed again. On a CPU, bf16 adds the size of all its activations.
    """
    if stage < placement.config.parallel.pipeline_model_parallel_size - 1:
        return int(layer)
    head = sum(head_activations(placement).values()) * placement.micro_batch_tokens
    return int(max(_loss_workspace(placement), layer - head))


def _layer_workspace(placement: Placement) -> float:
    config = placement.config
    training = placement.training
    e = placement.element
    model, cuda = config.model, placement.cuda
    blocks = [block for block, _ in model.kinds]
    inner = model.ffn_size / training.tensor_parallel
    packed = max(map(_packed_width, blocks)) / training.tensor_parallel
    if cuda:
        per_token = e * 3 * max(inner, packed)
    else:
        per_token = e * max(5 * inner, 4 * packed) + e * 2 * model.hidden_size
    # Recompute makes the missing activations of a layer again. On a CPU in bf16 the fp32 parts of a
    # layer have fp32 gradients of about the size of its activations (measured, not derived).
    plain = replace(
        placement, config=replace(config, train=replace(config.train, recompute="none"))
    )
    complete = max(sum(layer_activations(plain, block).values()) for block in blocks)
    kept = {
        "none": complete,
        "selective": min(sum(layer_activations(placement, block).values()) for block in blocks),
        "full": 0.0,
    }[config.train.recompute]
    missing = complete - (0.0 if placement.offloads_activations else kept)
    if e < WIDE and not cuda:
        missing += complete
    per_token += missing
    layer = per_token * placement.micro_batch_tokens + e * 2 * inner * model.hidden_size
    return layer + max(block.mixer.workspace_bytes(training) for block in blocks)


def _loss_workspace(placement: Placement) -> float:
    model = placement.config.model
    train = placement.config.train
    e = placement.element
    tokens, half = placement.micro_batch_tokens, e < WIDE
    rows = model.padded_vocab_size() / placement.training.tensor_parallel
    if train.loss_chunk:
        chunk = min(train.loss_chunk, tokens)
        logits = (e + WIDE * half) * chunk
        gradients = e * (chunk + model.hidden_size)
        accumulated = WIDE * model.hidden_size
        return rows * (max(logits, gradients) + accumulated) + placement.stream_bytes * tokens
    # Megatron's fused loss (on a GPU in bf16) turns the softmax into its gradient in place.
    softmax = 0 if placement.cuda and not train.z_loss else WIDE
    per_token = rows * (e + softmax) * half + e * model.hidden_size
    return per_token * tokens + e * rows * model.hidden_size


def _packed_width(block: BlockShape) -> int:
    """Return the number of channels of the mixer's widest linear map."""
    return max(
        (max(weight.shape) for weight in block.mixer.weights().values() if len(weight.shape) == 2),
        default=0,
    )
