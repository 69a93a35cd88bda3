"""Compute the plan of a run from its configuration alone.

The plan contains parameters, FLOPs per token, steps and the size of checkpoints. Memory is computed
in ``pretrain.plan.memory``; ``render`` formats the plan for the console. Parameter names and shapes
are those of the built model. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from fem_common.costs import CONTENTS
from fem_common.text import gib, si
from fem_megatron.catalogue import BASELINE
from fem_megatron.config import ModelConfig
from fem_megatron.mup import outer_weights, width_ratio
from fem_megatron.shape import BlockShape, Weight, Weights
from pretrain.config import RunConfig
from pretrain.plan import context_parallel, fp8, muon
from pretrain.plan.devices import memory_gib
from pretrain.plan.memory import (
    StageMemory,
    additional_lines,
    is_estimated,
    stages_memory,
    zero_variants,
)
from pretrain.plan.placement import Placement, blocks_by_mixer
from pretrain.plan.zero_memory import zero_name
from pretrain.schedule import Schedule

if TYPE_CHECKING:
    from pretrain.data.facts import DataFacts
    from pretrain.data.part_lengths import PartLengths

COMPONENTS = ("embedding", "mixer", "conditioner", "MLP", "norms", "output layer", "MTP")

Shapes = dict[str, tuple[int, ...]]


# --- parameters ----------------------------------------------------------------------------------


def model_weights(model: ModelConfig) -> Weights:
    """Return name -> weight of every parameter of the full model, with the names of its state dict.

    Weights are unsharded, and a tied output layer is absent.
    """
    outer = outer_weights(model)
    embedding = "embedding.word_embeddings.weight"
    weights: Weights = {embedding: outer.pop(embedding)}
    for layer, block in enumerate(model.blocks()):
        weights.update(
            {f"decoder.layers.{layer}.{name}": weight for name, weight in block.weights().items()}
        )
    for number in range(model.mtp_depth):
        weights.update(
            {f"mtp_modules.{number}.{name}": weight for name, weight in model.mtp.weights().items()}
        )
    return weights | outer


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return name -> shape of every parameter of the full model."""
    return {name: weight.shape for name, weight in model_weights(model).items()}


def component(name: str) -> str:
    """Return the component, one of COMPONENTS, to which a parameter belongs."""
    if name.startswith("mtp_modules."):
        return "MTP"
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "output layer"
    if ".tdc." in name:
        return "conditioner"
    if name.endswith(("layernorm.weight", ".norm.weight")):
        return "norms"
    return "mixer" if ".mixer." in name else "MLP"


def count_by_component(model: ModelConfig) -> dict[str, int]:
    """Return component -> number of parameters of the full model."""
    counts: dict[str, int] = {}
    for name, shape in parameter_shapes(model).items():
        counts[component(name)] = counts.get(component(name), 0) + math.prod(shape)
    return counts


def stage_parameters(config: RunConfig, *, muon: bool = False) -> list[int]:
    """Return the exact number of parameters of one rank of each pipeline stage.

    A tied embedding counts on the first and the last stage. muon: count only the parameters that
    Muon updates.
    """
    layout, model = config.parallel, config.model
    stages = layout.pipeline_model_parallel_size

    def own(weight: Weight) -> int:
        if muon and not (weight.orthogonal and config.optimizer.name == "muon"):
            return 0
        return weight.size // (1 if weight.split is None else layout.tensor_model_parallel_size)

    # Interleaving assigns the layers in another order, but the same number to each stage.
    sizes = [sum(map(own, block.weights().values())) for block, _ in model.kinds]
    bounds = [-(-stage * model.num_layers // stages) for stage in range(stages + 1)]
    parts = [model.layer_kinds[first:end] for first, end in pairwise(bounds)]
    counts = [sum(size * part.count(n) for n, size in enumerate(sizes)) for part in parts]
    if model.mtp_depth:
        counts[-1] += model.mtp_depth * sum(map(own, model.mtp.weights().values()))
    for name, weight in outer_weights(model).items():
        ends = {0, stages - 1} if model.tie_embeddings else {0}
        for stage in ends if component(name) == "embedding" else {stages - 1}:
            counts[stage] += own(weight)
    return counts


# --- FLOPs ---------------------------------------------------------------------------------------


def forward_flops(
    model: ModelConfig, seq_length: int, part_lengths: PartLengths | None = None
) -> dict[str, float]:
    """Return component -> FLOPs of one token's forward pass.

    Only matrix products are counted; a multiply-add counts as two. The modules of multi-token
    prediction are included. Attention is counted over the causal half: a token reads (seq_length +
    1) / 2 keys on average. ``Shape.flops`` returns each mixer's own products.

    part_lengths: lengths of the documents if they are read separately; each is then counted by its
    own length, and padding tokens are not counted.
    """
    flops: dict[str, float] = {}
    for block, count in model.trained_kinds:
        for name, value in _block_flops(block, seq_length, part_lengths).items():
            flops[name] = flops.get(name, 0.0) + count * value
    logits = 2.0 * model.padded_vocab_size() * model.hidden_size
    flops["output layer"] = (1 + model.mtp_depth) * logits
    flops["MTP projections"] = model.mtp_depth * 4.0 * model.hidden_size**2
    return {name: value for name, value in flops.items() if value}


def _block_flops(
    block: BlockShape, seq_length: int, part_lengths: PartLengths | None
) -> dict[str, float]:
    if part_lengths is None:
        return block.flops(seq_length)
    return part_lengths.mean_over(lambda document: block.flops(seq_length, document=document))


def decoding_state_bytes(model: ModelConfig, length: int, element: int) -> int:
    """Return the bytes of one sequence's decoding state after ``length`` tokens, in all layers.

    element: bytes of an activation.
    """
    return sum(count * block.state_bytes(length, element) for block, count in model.kinds)


def flops_per_token(config: RunConfig) -> float:
    """Return the model FLOPs of training on one token of a full sequence.

    They are three times the FLOPs of the forward pass, since the backward pass counts twice as
    much. Recompute is not counted.
    """
    return 3.0 * sum(forward_flops(config.model, config.data.seq_length).values())


def recomputed_flops(config: RunConfig, forward: Mapping[str, float]) -> dict[str, float]:
    """Return component -> FLOPs per token that recompute adds.

    forward: FLOPs of the forward pass. The result contains those components that run twice.
    """
    once = {
        "none": set(forward),
        "selective": {"mixer projections", "conditioner"},
        "full": set[str](),
    }[config.train.recompute]
    return {part: value for part, value in forward.items() if part not in once | {"output layer"}}


# --- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan(Placement):
    """Requirements of a run. Sizes are in bytes, FLOPs per token.

    train_flops is the numerator of the MFU; hardware_flops also counts recompute. Both use
    ``part_lengths``, the lengths of the documents, if documents are read separately and the data is
    available.
    """

    world_size: int
    schedule: Schedule
    forward_flops: dict[str, float]
    train_flops: float
    hardware_flops: float
    part_lengths: PartLengths | None
    memory: tuple[StageMemory, ...]
    train_data_tokens: int | None

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Component -> number of parameters of the full model."""
        return count_by_component(self.config.model)

    @property
    def dense_flops(self) -> float:
        """Training FLOPs per token over full sequences, even if documents are read separately."""
        return flops_per_token(self.config)

    @property
    def transformer_parameters(self) -> int:
        """Number of parameters of a Transformer of the same width.

        The number does not depend on the number of heads; one head is used because it fits any
        width.
        """
        model = self.config.model
        twin = ModelConfig(
            mixer=BASELINE,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_attention_heads=1,
            ffn_hidden_size=model.ffn_hidden_size,
            vocab_size=model.vocab_size,
            make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
            tie_embeddings=model.tie_embeddings,
            mtp_depth=model.mtp_depth,
            rope=False,
        )
        return sum(count_by_component(twin).values())

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint in bytes."""
        stored, muon_used = stored_bytes(self.config), self.config.optimizer.name == "muon"
        return sum(
            weight.size * (stored - 4 * (muon_used and weight.orthogonal))
            for weight in model_weights(self.config.model).values()
        )

    @property
    def total_parameters(self) -> int:
        """Number of parameters of the full model; tied weights count once."""
        return sum(self.parameters.values())

    @property
    def non_embedding_parameters(self) -> int:
        """Number of parameters without the embedding, the output layer and the MTP modules."""
        return sum(
            count
            for name, count in self.parameters.items()
            if name not in ("embedding", "output layer", "MTP")
        )

    @property
    def tokens(self) -> int:
        """Number of tokens that the run consumes, in full steps."""
        return self.schedule.steps * self.schedule.step_tokens

    @property
    def save_memory(self) -> int:
        """Most bytes of host memory that the rank with the most data uses for a save.

        On a GPU the rank copies its part of the checkpoint to the host. The copy is 1/32 larger,
        because the staging blocks are not completely filled: up to 2.2% of the blocks of
        `fem_megatron.megatron.staging` stay empty for models of 1.3B to 70B parameters. On a CPU a
        forked writer keeps every page of the part that training changes while it writes. A save
        for which training waits copies only one tensor per file at a time.
        """
        parts = 33 if self.cuda else 32
        stored = stored_bytes(self.config)
        most = max(stage.parameters * stored - 4 * stage.muon_parameters for stage in self.memory)
        return most // self.replicas * parts // 32

    @property
    def peak_memory(self) -> int:
        """Peak device bytes of the rank that needs most memory."""
        return max(stage.total for stage in self.memory)


def make_plan(
    config: RunConfig, world_size: int, facts: DataFacts | None = None, *, cuda: bool = True
) -> Plan:
    """Return the plan of a validated configuration on ``world_size`` processes.

    ``cuda`` selects the memory model of a GPU or of a CPU. ``model.vocab_size`` must be known
    (given, or filled in by ``pretrain.data.facts.fill_from_data``).
    """
    placement = Placement(
        config=config, data_parallel=world_size // config.parallel.model_parallel, cuda=cuda
    )
    counts = zip(stage_parameters(config), stage_parameters(config, muon=True), strict=True)
    part_lengths = None
    if facts is not None and config.data.documents == "separate":
        # Imported late, because it imports numpy, which a plan of full sequences does not need.
        from pretrain.data.part_lengths import part_lengths_of

        part_lengths = part_lengths_of(config, facts)
    forward = forward_flops(config.model, config.data.seq_length, part_lengths)
    train = 3.0 * sum(forward.values())
    return Plan(
        **vars(placement),
        world_size=world_size,
        schedule=Schedule.of(config),
        forward_flops=forward,
        train_flops=train,
        hardware_flops=train + sum(recomputed_flops(config, forward).values()),
        part_lengths=part_lengths,
        memory=stages_memory(placement, counts),
        train_data_tokens=facts.tokens["train"] if facts else None,
    )


def stored_bytes(config: RunConfig) -> int:
    """Return the bytes per parameter in a checkpoint: the weight and the fp32 optimizer state.

    The weight has the training precision. Megatron's distributed optimizer stores its fp32
    parameters with the two moments in either precision; the plain optimizer stores them only in
    bf16.
    """
    bf16 = config.train.precision == "bf16"
    main_parameter = 4 if bf16 or config.parallel.use_distributed_optimizer else 0
    return (2 if bf16 else 4) + main_parameter + 8


def render(plan: Plan) -> str:
    """Return the plan as text for the console."""
    return "\n".join(
        line
        for part in (_model_lines, _cost_lines, _layout_lines, _memory_lines)
        for line in part(plan)
    )


def memory_excess(plan: Plan) -> str | None:
    """Return an error text if the rank with the highest peak needs more memory than log.device has.

    Returns None if the memory is sufficient or the device's memory is unknown.
    """
    device = plan.config.log.device
    memory_limit = memory_gib(device) if device else None
    if memory_limit is None or plan.peak_memory <= memory_limit * 2**30:
        return None
    cuts = (
        made
        for made in context_parallel.finer_splits(plan.config, plan.world_size)
        if make_plan(*made, cuda=plan.cuda).peak_memory <= memory_limit * 2**30
    )
    enough = next((made.parallel.context_parallel_size for made, _ in cuts), None)
    return (
        f"log.device = {device} has {memory_limit} GiB of memory, and a rank needs "
        f"{gib(plan.peak_memory)}: lower train.micro_batch_size, set train.recompute=full or "
        "train.loss_chunk, or split the model further (parallel.*, engine.*)"
        + (f"; the smallest parallel.context_parallel_size that fits: {enough}" if enough else "")
    )


def _model_lines(plan: Plan) -> Iterator[str]:
    model, total = plan.config.model, plan.total_parameters
    blocks = blocks_by_mixer(model)
    part = "" if model.repeated == "block" else f"'s {model.repeated}"
    again = f", each{part} applied {model.recurrence} times" if model.recurrence > 1 else ""
    what = " ".join(model.pattern or (model.mixer,))
    yield (
        f"{plan.config.name}: {what}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_attention_heads} heads{again}"
    )
    for name, block in blocks.items():
        yield f"  {name}: {', '.join(shape.summary() for shape in block.parts.values())}"
    yield f"  vocabulary {model.vocab_size} padded to {model.padded_vocab_size()}"
    if model.parametrization == "mup":
        yield (
            f"  muP: m = {width_ratio(model):g}, from a base of width {model.mup.base_hidden_size}"
        )
    yield "parameters"
    for name in COMPONENTS:
        if name in plan.parameters:
            count = plan.parameters[name]
            yield f"  {name:<18} {count:>15,}  {100 * count / total:5.1f}%"
    yield (
        f"  {'total':<18} {total:>15,}  ({plan.non_embedding_parameters:,} without embedding and "
        f"output layer{', and without MTP' if model.mtp_depth else ''})"
    )
    if any(block.mixer.external for block in blocks.values()):
        yield (
            "  without the parameters inside flash-linear-attention's layers, whose number is "
            "unknown"
        )
    elif set(blocks) != {BASELINE}:
        excess = 100 * (total / plan.transformer_parameters - 1)
        yield (
            f"  a Transformer of this width has {plan.transformer_parameters:,}: this model has "
            f"{excess:+.2f}%"
        )


def _cost_lines(plan: Plan) -> Iterator[str]:
    config, forward = plan.config, sum(plan.forward_flops.values())
    half = "causal half" if plan.part_lengths is None else "causal half of each document's part"
    yield (
        f"FLOPs per token (matrix products; attention over the {half} of {config.data.seq_length})"
    )
    for name, value in plan.forward_flops.items():
        yield f"  {name:<18} {si(value):>11}FLOP  {100 * value / forward:5.1f}%"
    yield f"  forward {si(forward)}FLOP, training {si(plan.train_flops)}FLOP" + (
        f", with recompute {si(plan.hardware_flops)}FLOP"
        if plan.hardware_flops != plan.train_flops
        else ""
    )
    if config.train.fp8 != "none":
        yield f"  {fp8.line(config, forward)}"
    if config.data.documents == "separate":
        yield f"  {_documents_line(plan)}"
    if config.optimizer.name == "muon":
        weights = model_weights(config.model).values()
        step_flops = plan.train_flops * plan.schedule.step_tokens
        yield f"  {muon.line(plan, weights, step_flops)}"
    length = config.data.seq_length
    state = decoding_state_bytes(config.model, length, plan.element)
    yield f"  decoding state of {length:,} tokens: {gib(state)} a sequence"
    schedule = plan.schedule
    yield "length"
    yield (
        f"  {schedule.steps:,} steps of {schedule.step_tokens:,} tokens = {si(plan.tokens)}tokens "
        f"({plan.tokens:,})"
    )
    warmup = schedule.warmup_samples // schedule.batch_samples
    yield f"  warm-up {warmup:,} steps; training compute {si(plan.tokens * plan.train_flops)}FLOP"
    if plan.train_data_tokens is not None:
        yield (
            f"  training data {plan.train_data_tokens:,} tokens: "
            f"{plan.tokens / max(1, plan.train_data_tokens):.2f} epochs"
        )


def _documents_line(plan: Plan) -> str:
    part_lengths = plan.part_lengths
    if part_lengths is None:
        return (
            "counted over full sequences: documents are separate, but their lengths are unknown "
            "without the data"
        )
    read = (
        ""
        if part_lengths.read == part_lengths.documents
        else f" ({part_lengths.read:,} of {part_lengths.documents:,} were read)"
    )
    return (
        f"by documents of {part_lengths.mean:,.0f} tokens on average{read}; over full sequences "
        f"training {si(plan.dense_flops)}FLOP"
    )


def _layout_lines(plan: Plan) -> Iterator[str]:
    layout, train = plan.config.parallel, plan.config.train
    chunks = layout.virtual_pipeline_model_parallel_size
    sizes = f"TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size}"
    if chunks:
        sizes += f" (interleaved, {chunks} chunks a rank)"
    if layout.context_parallel_size > 1:
        sizes += f" x CP {layout.context_parallel_size}"
    sizes += f" x DP {plan.data_parallel}"
    if plan.config.engine.name == "deepspeed":
        sizes += f" (DeepSpeed, {zero_name(plan.config.engine)})"
    elif layout.use_distributed_optimizer:
        sizes += " (distributed optimizer)"
    if layout.sequence_parallel:
        sizes += ", sequence parallel"
    yield "layout"
    yield f"  {plan.world_size} process{'es' if plan.world_size > 1 else ''} = {sizes}"
    yield (
        f"  a step is {plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''} of "
        f"{train.micro_batch_size} x {plan.config.data.seq_length} tokens on each data-parallel "
        f"rank, {train.precision}, recompute {train.recompute}"
    )
    yield from context_parallel.lines(plan)


def _memory_lines(plan: Plan) -> Iterator[str]:
    # Rows of separate documents are padded copies, which exist in addition to their sources.
    rows = plan.config.data.documents == "separate"
    estimated = "; activations estimated, to about 25%" if rows or is_estimated(plan) else ""
    yield f"memory per rank ({'GPU' if plan.cuda else 'CPU, without the libraries'}{estimated})"
    header = ("parameters", *CONTENTS, "peak")
    yield "  " + "stage".ljust(6) + "".join(title.rjust(14) for title in header)
    for stage in plan.memory:
        yield "  " + str(stage.stage).ljust(6) + f"{stage.parameters:>14,}" + _sizes(stage)
    yield from additional_lines(plan, plan.memory, plan.world_size)
    if plan.config.engine.name == "deepspeed":
        yield from _zero_lines(plan)
    if excess := memory_excess(plan):
        yield f"DOES NOT FIT: {excess}"
    checkpoint = plan.config.checkpoint
    yield (
        f"checkpoint on disk: {gib(plan.checkpoint_bytes)}; "
        f"{checkpoint.keep_last + len(checkpoint.keep)} kept"
    )
    meanwhile = "while training continues" if checkpoint.async_save else "while training waits"
    speed = checkpoint.gb_per_second
    took = (
        f"in {plan.checkpoint_bytes / speed / 1e9:.3g} s at {speed:g} GB/s"
        if speed
        else "(duration: set checkpoint.gb_per_second)"
    )
    yield f"  written {took} {meanwhile}, from up to {gib(plan.save_memory)} of host memory a rank"


def _zero_lines(plan: Plan) -> Iterator[str]:
    """Yield the memory of the same rank under every ZeRO stage and offload.

    The line of the run's own stage is marked.
    """
    (own,) = plan.memory
    host = plan.cuda
    yield (
        "under DeepSpeed's stages (the peak is below the sum, because gradients replace "
        "activations)"
    )
    titles = (*CONTENTS, "peak", *(("host",) if host else ()))
    yield "  " + " " * 30 + "".join(title.rjust(14) for title in titles)
    for name, memory in zero_variants(plan, own).items():
        mark = "* " if name == zero_name(plan.config.engine) else "  "
        yield mark + name.ljust(30) + _sizes(memory) + (gib(memory.host).rjust(14) if host else "")


def _sizes(stage: StageMemory) -> str:
    sizes = (*stage.by_content().values(), stage.total)
    return "".join(gib(size).rjust(14) for size in sizes)
