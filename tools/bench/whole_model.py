"""Complete models in one process with plain torch, and the cost of their training step.

A model consists of an embedding, the layers that training and export share, and an output layer.

A training step is forward, backward and AdamW on weights of one dtype, without Megatron's main
weights, process groups and data loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.megatron import fusions, platform
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.mup import outer_weights, starts_from
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import Normal
from fem_megatron.state import Context
from fem_megatron.update import rms_norm
from pretrain.data.part_lengths import PartLengths
from pretrain.plan.run_plan import count_by_component, forward_flops
from tools.bench.runner import Timing, measure

BASELINE = "Transformer"
ALL_TOKENS = Context()
WITHOUT = FemConfig(conditioner=False, free_energy=False, temperature=False, gate=False)


@dataclass(frozen=True)
class Scale:
    """Sizes that the compared models share, and the batch of one step.

    model: configuration without the mixer, which each compared model replaces.
    tokens: length of a sequence.
    batch: number of sequences.
    documents: average tokens per document, where documents do not attend to each other; 0: one
        document per sequence.
    dtype: of the weights.
    """

    about: str
    model: ModelConfig
    tokens: int
    batch: int
    documents: int = 0
    dtype: torch.dtype = torch.bfloat16

    def begins(self) -> Tensor:
        """Return a [batch, tokens] bool tensor that is True where a document begins.

        The positions are random, with a fixed seed.
        """
        begins = (
            torch.rand(self.batch, self.tokens, generator=torch.Generator().manual_seed(0))
            * self.documents
            < 1
        )
        begins[:, 0] = True
        return begins

    def flops(self, model: ModelConfig) -> float:
        """Return the model's FLOPs of a training step: forward + backward.

        The cost of attention depends on the length of each document.
        """
        if not self.documents:
            return 3.0 * self.batch * self.tokens * sum(forward_flops(model, self.tokens).values())
        first = self.begins().flatten().nonzero()[:, 0]
        sizes = torch.diff(first, append=torch.tensor([self.batch * self.tokens]))
        shares = torch.bincount(sizes, sizes.double(), self.tokens + 1) / sizes.sum()
        part_lengths = PartLengths(
            shares.numpy(), float(sizes.double().mean()), len(sizes), len(sizes)
        )
        return (
            3.0
            * self.batch
            * self.tokens
            * sum(forward_flops(model, self.tokens, part_lengths).values())
        )


def _scale(
    about: str, layers: int, hidden: int, heads: int, inner: int | None, tokens: int, batch: int
) -> Scale:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=inner,
        vocab_size=32000,
    )
    return Scale(about, model, tokens, batch)


SCALES: dict[str, Scale] = {
    "1.3B": _scale("configs/model/transformer_1.3b.yaml", 24, 2048, 16, 5632, 4096, 2),
    "340M": _scale("configs/model/transformer_340m.yaml", 24, 1024, 16, 2816, 4096, 4),
    "table 5": _scale("the FEM paper's table 5: 8 layers of 512", 8, 512, 4, None, 2048, 4),
    "table 7": _scale("the FEM paper's table 7: 12 layers of 768", 12, 768, 12, None, 1024, 8),
    "162M": _scale("the CEM paper's 162M (its table 1)", 12, 864, 12, 2304, 2048, 8),
    "134M": _scale("the CEM paper's 134M", 12, 768, 12, 2048, 2048, 8),
    "108M": _scale("the CEM paper's 108M", 12, 672, 12, 1792, 2048, 8),
    "86M": _scale("the CEM paper's 86M", 8, 672, 8, 1792, 2048, 8),
}
TABLES = tuple(name for name in SCALES if name.startswith("table"))
SINGLE = {f"{name}, fp32": name for name in TABLES}
"""The paper's tables in the paper's precision -> in bfloat16."""
SCALES |= {name: replace(SCALES[of], dtype=torch.float32) for name, of in SINGLE.items()}
PACKED = {f"{name}, documents": name for name in ("1.3B", "340M")}
SCALES |= {
    packed: replace(SCALES[name], about=f"{SCALES[name].about}, separate documents", documents=512)
    for packed, name in PACKED.items()
}

Variant = Callable[[ModelConfig], ModelConfig]


def _mixer(name: str) -> Variant:
    return lambda model: replace(model, mixer=name)


def _fem(prior: str, letters: str) -> Variant:
    """Return a FEM over ``prior`` with these of C, L, T and G.

    The conditioner has the paper's width, D / 64, rounded up to a multiple of the heads.
    """

    def made(model: ModelConfig) -> ModelConfig:
        heads = model.num_attention_heads
        width = -(-model.hidden_size // 64 // heads) * heads if "C" in letters else None
        switches = FemConfig(
            conditioner="C" in letters,
            free_energy="L" in letters,
            temperature="T" in letters,
            gate="G" in letters,
            conditioner_size=width,
        )
        return replace(model, mixer=f"fem_{prior}", fem=switches)

    return made


VARIANTS: Mapping[str, Variant] = {
    BASELINE: _mixer("transformer"),
    "FEM-SM, C L T G": _fem("softmax", "CLTG"),
    "FEM-SM, L T G": _fem("softmax", "LTG"),
    "FEM-SM, L T": _fem("softmax", "LT"),
    "FEM-SM, L": _fem("softmax", "L"),
    "FEM-GLA, C L T G": _fem("gla", "CLTG"),
    "GLA": _fem("gla", ""),
    "CEM": lambda model: replace(model, mixer="cem", cem=CemConfig(alibi="powers")),
}
ROWS: Mapping[str, Variant] = {
    "FEM-SM, C L T": _fem("softmax", "CLT"),
    "FEM-SM, C L": _fem("softmax", "CL"),
    "FEM-SM, C": _fem("softmax", "C"),
    "FEM-GLA, L T G": _fem("gla", "LTG"),
    "FEM-Mamba, C L T G": _fem("mamba", "CLTG"),
    "FEM-Mamba, L T G": _fem("mamba", "LTG"),
    "linear attention": _fem("linear", ""),
    "Mamba-2": _mixer("mamba2"),
    "DeltaNet": _mixer("deltanet"),
    "Gated DeltaNet": _mixer("gated_deltanet"),
    "differential": _mixer("differential"),
}
"""Further rows of the paper's tables 5 and 7, which are timed at their scales only."""
MODELS = {**VARIANTS, **ROWS}


class Fused(OneProcess):
    """`Parallel` interface of one process, with the fused kernels of a training run if possible."""

    def swiglu(self, packed: Tensor) -> Tensor:
        """Implement `fem_megatron.parallel.Parallel.swiglu` with the fused kernel."""
        return fusions.swiglu(packed)


OUTER = {
    "embedding": "embedding.word_embeddings.weight",
    "velocities": "embedding.velocity.word_embeddings.weight",
    "norm": "decoder.final_layernorm.weight",
    "output": "output_layer.weight",
}


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm and output layer, initialised like the training model.

    device: None uses this process's device.
    parallel: the `Parallel` interface that the layers use; None uses this machine's fused kernels.
    recompute: recompute the activations of each block in the backward pass.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        device: torch.device | None = None,
        parallel: OneProcess | None = None,
    ) -> None:
        super().__init__()
        self.recompute, self.eps = recompute, model.norm_eps
        rows, hidden = model.padded_vocab_size(), model.hidden_size
        with torch.device(device or platform.device()):
            self.embedding = nn.Parameter(torch.empty(rows, hidden, dtype=dtype))
            moves = model.stream_size > hidden
            self.velocities = (
                nn.Parameter(torch.empty(rows, hidden, dtype=dtype)) if moves else None
            )
            self.blocks = nn.ModuleList(
                Block(shape, parallel or Fused(dtype)) for shape in model.blocks()
            )
            self.norm = nn.Parameter(torch.ones(hidden, dtype=dtype))
            self.output = nn.Parameter(torch.empty(rows, hidden, dtype=dtype))
        outer = outer_weights(replace(model, tie_embeddings=False))
        with torch.no_grad():
            for name, weight in self.named_parameters():
                start = starts_from(
                    model, weight.spec if hasattr(weight, "spec") else outer[OUTER[name]]
                )
                if isinstance(start, Normal):
                    weight.normal_(0.0, start.std)

    def forward(self, tokens: Tensor, labels: Tensor, context: Context = ALL_TOKENS) -> Tensor:
        """Return the mean loss (float32 or wider) for tokens and labels [b, t]."""
        x = self.embedding[tokens]
        if self.velocities is not None:
            x = torch.cat((x, self.velocities[tokens]), dim=-1)
        x = x.transpose(0, 1).contiguous()
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, context, use_reentrant=False)
            else:
                x = block(x, context)
        logits = linear(rms_norm(x[..., : len(self.norm)], self.norm, self.eps), self.output)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cross_entropy(logits.to(wide).flatten(0, 1), labels.T.flatten())


@dataclass(frozen=True)
class StepCost:
    """Cost of one training step of one model.

    tokens: tokens of the step, in ``batch`` sequences.
    flops: FLOPs of the model, forward + backward, without recomputation.
    parameters: number of parameters.
    peak_bytes: peak memory of the device.
    recompute: True if the activations were recomputed.
    """

    step: Timing
    tokens: int
    flops: float
    parameters: int
    peak_bytes: int
    recompute: bool
    batch: int

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepCost:
        """Restore a cost from JSON values."""
        return cls(**{**values, "step": Timing(**values["step"])})

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second."""
        return self.tokens / self.step.seconds

    def utilisation(self, peak_flops: float) -> float:
        """Return the MFU: the model's FLOP/s as a share of the device's peak FLOP/s."""
        return self.flops / self.step.seconds / peak_flops


def train_step(
    variant: str, scale: Scale, dtype: torch.dtype, budget: float, *, recompute: bool = False
) -> StepCost:
    """Time a model's training step on random tokens and return its cost.

    variant: key of MODELS.
    budget: approximate seconds of the timing.

    Raises torch.OutOfMemoryError if the step does not fit in memory.
    """
    config = MODELS[variant](scale.model)
    platform.reset_peak_memory()
    model = LanguageModel(config, dtype, recompute=recompute)
    device = platform.device()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rng = torch.Generator().manual_seed(0)
    shape = (4, scale.batch, scale.tokens + 1)
    assert config.vocab_size is not None
    batches = torch.randint(0, config.vocab_size, shape, generator=rng).to(device)
    begins = scale.begins() if scale.documents else None

    def step(number: int) -> Tensor:
        batch, context = batches[number % len(batches)], Context()
        if begins is not None:  # made for every micro-batch, as in training
            documents = Documents.of(begins).to(device)
            context = Context(documents.positions, documents=documents)
        loss: Tensor = model(batch[:, :-1], batch[:, 1:], context)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    timing = measure(step, budget, most=20)
    parameters = sum(count_by_component(config).values())
    return StepCost(
        timing,
        scale.batch * scale.tokens,
        scale.flops(config),
        parameters,
        platform.peak_memory_bytes(),
        recompute,
        scale.batch,
    )
