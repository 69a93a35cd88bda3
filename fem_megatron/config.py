"""The model's configuration as plain dataclasses, importable without torch.

Training, planning and export share it. Every field carries its description and its range
(`fem_common.settings`). The configuration reader and the generated documentation page use
both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fem_common.settings import moved, setting
from fem_megatron import catalogue
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.delta.shape import DeltaConfig
from fem_megatron.mixers.energy_transformer.shape import EnergyTransformerConfig
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.mixers.fla.shape import FlaConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from fem_megatron.mixers.mamba2.shape import Mamba2Config
from fem_megatron.mixers.nrgpt.shape import NrgptConfig
from fem_megatron.mixers.second_order.shape import SecondOrderConfig
from fem_megatron.mtp import MtpShape
from fem_megatron.mup import PARAMETRIZATIONS, MupConfig
from fem_megatron.rope import MOVED, RopeScaling
from fem_megatron.shape import BlockShape

MIXERS = tuple(catalogue.MIXERS)


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only language model (section ``model``)."""

    moved: ClassVar[dict[str, str]] = MOVED  # older names of keys -> current names

    mixer: str = setting(
        "fem_softmax",
        "The token mixer of every layer (`python -m pretrain --list-mixers`).",
        MIXERS,
    )
    pattern: tuple[str, ...] | None = setting(
        None,
        "Hybrids: the mixers of the first layers, repeated to num_layers; null: `mixer` in all.",
        MIXERS,
    )
    mlp: str | None = setting(
        None,
        "The MLP after the mixer; null: the mixer's default (cem and yuriiformer: the MLP of the "
        "same name; hyperset, energy_transformer and nrgpt: none; others: swiglu).",
        (*catalogue.MLPS, "none"),
    )
    recurrence: int = setting(
        1,
        "Number of times that every block is applied, with the same weights (the loop "
        "Transformer; Hyper-SET's depth).",
        least=1,
    )
    repeated: str = setting(
        "block",
        "The part of a block that recurrence repeats: all of it, or only its mixer or its MLP "
        "(the reuse of layers that CEM's recursion is compared with).",
        ("block", "mixer", "mlp"),
    )
    hidden_size: int = setting(768, "Width D of the residual stream.", least=1)
    num_layers: int = setting(12, "Number of blocks (mixer + MLP).", least=1)
    num_attention_heads: int = setting(12, "Heads H of the mixer.", least=1)
    num_query_groups: int | None = setting(
        None,
        "Heads of keys and values that the transformer's queries share; null: one per head.",
        least=1,
    )
    ffn_hidden_size: int | None = setting(
        None,
        "Inner width of the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 64.",
        least=1,
    )
    vocab_size: int | None = setting(
        None, "Entries of the tokenizer; null: read from the data's manifest.", least=1
    )
    make_vocab_size_divisible_by: int = setting(
        128, "The embedding is padded to a multiple of this; independent of the layout.", least=1
    )
    tie_embeddings: bool = setting(False, "Share the input embedding with the output layer.")
    causal: bool = setting(
        True,
        "A token sees itself and earlier tokens; false: all tokens (encoders, from Python; not "
        "for `pretrain`).",
    )
    rope: bool = setting(
        True, "Rotary position embedding on queries and keys, for the mixers that have them."
    )
    rope_base: int = setting(10000, "Base of the rotary frequencies.", least=1)
    rope_scaling: RopeScaling = setting(
        RopeScaling,
        "Rotary frequencies for longer texts (docs/long_context.md), for the mixers that use RoPE.",
    )
    qk_norm: bool = setting(
        False,
        "RMS norm, with weights, of each head's queries and keys before RoPE (Qwen3), for "
        "transformer, yuriiformer, differential and fem_softmax. Other mixers do not support it: "
        "their energies depend on the unnormalised vectors, and hyperset has built-in norms.",
    )
    norm_eps: float = setting(1e-6, "Epsilon of every norm.", above=0)
    mtp_depth: int = setting(
        0,
        "Modules of multi-token prediction (DeepSeek-V3): module k predicts the token k + 1 places "
        "ahead, with one more block of the last layer's kind. They add to the training loss only; "
        "validation and an exported model are without them (docs/mtp.md).",
        least=0,
    )
    mtp_loss_weight: float = setting(
        0.3,
        "Weight of the mean loss of these modules in the training loss. DeepSeek-V3: 0.3, and 0.1 "
        "for the last third of the tokens.",
        least=0,
    )
    init_std: float = setting(
        0.02, "Standard deviation of the normal initialisation of every matrix.", above=0
    )
    parametrization: str = setting(
        "standard",
        "Scaling of initialisation and learning rates with the width. standard: none; mup: the "
        "best learning rate of a narrow model is also best for a wide one (Yang et al. 2022; "
        "docs/scaling.md); init_std and optimizer.lr are those of the base.",
        PARAMETRIZATIONS,
    )
    mup: MupConfig = setting(MupConfig, "The base of parametrization mup.")
    attention_backend: str = setting(
        "auto",
        "Implementation of FEM's read. auto: the fastest form that machine and call allow "
        "(python -m kernels), or the exact form if the values' range is too wide for it; fused: "
        "torch's attention on [v | exp(beta v - r)], with the same exception; reference: always "
        "the exact log-sum-exp.",
        ("auto", "fused", "reference"),
    )
    attention: AttentionConfig = setting(
        AttentionConfig, "Switches of standard attention, for mixers transformer and yuriiformer."
    )
    fem: FemConfig = setting(FemConfig, "The Free Energy Mixer's switches and sizes.")
    cem: CemConfig = setting(
        CemConfig, "Switches and sizes of Causal Energy Minimization, attention and MLP."
    )
    second_order: SecondOrderConfig = setting(
        SecondOrderConfig, "Switches of second-order attention."
    )
    hyperset: HyperSetConfig = setting(HyperSetConfig, "Hyper-SET's switches and sizes.")
    energy_transformer: EnergyTransformerConfig = setting(
        EnergyTransformerConfig, "The Energy Transformer's step size and memories."
    )
    nrgpt: NrgptConfig = setting(NrgptConfig, "NRGPT's feed-forward energy and its width.")
    delta: DeltaConfig = setting(DeltaConfig, "Sizes of DeltaNet and Gated DeltaNet.")
    mamba2: Mamba2Config = setting(Mamba2Config, "Sizes of Mamba-2.")
    fla: FlaConfig = setting(FlaConfig, "Arguments of a layer of flash-linear-attention.")

    @property
    def ffn_size(self) -> int:
        """The MLP's inner width, with the default filled in."""
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def stream_size(self) -> int:
        """Channels per token that layers pass on to the next layer.

        This is hidden_size, or twice hidden_size if any layer uses a velocity.
        """
        return max(part.stream for block, _ in self.kinds for part in block.parts.values())

    def padded_vocab_size(self) -> int:
        """Return the rows of the embedding table.

        This is vocab_size rounded up to a multiple of make_vocab_size_divisible_by.
        """
        assert self.vocab_size is not None, (
            "vocab_size is filled in from the data before the model is built"
        )
        step = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // step) * step

    def blocks(self) -> list[BlockShape]:
        """Return the shape of every layer. Raise ValueError, naming the key, for wrong sizes."""
        return [*self._blocks]

    @cached_property
    def kinds(self) -> tuple[tuple[BlockShape, int], ...]:
        """The distinct layer shapes, each with the number of layers that have it."""
        return tuple(Counter(self._blocks).items())

    @property
    def mtp(self) -> MtpShape:
        """The shape of each module of multi-token prediction."""
        return MtpShape(self._blocks[-1], self.hidden_size, self.stream_size, self.norm_eps)

    @property
    def trained_kinds(self) -> tuple[tuple[BlockShape, int], ...]:
        """The `kinds`, with the blocks of the modules of multi-token prediction."""
        return tuple(Counter([*self._blocks, *self.mtp_depth * self._blocks[-1:]]).items())

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """The index into `kinds` of every layer."""
        index = {shape: number for number, (shape, _) in enumerate(self.kinds)}
        return tuple(index[shape] for shape in self._blocks)

    @cached_property
    def mixers(self) -> tuple[tuple[str, BlockShape, int], ...]:
        """The distinct pairs of mixer and layer shape, each with its number of layers."""
        counts = Counter(zip(catalogue.mixer_names(self), self._blocks, strict=True))
        return tuple((name, shape, count) for (name, shape), count in counts.items())

    @cached_property
    def _blocks(self) -> tuple[BlockShape, ...]:
        return tuple(catalogue.blocks(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Build the configuration from the output of ``dataclasses.asdict``.

        Older names of keys are accepted. Unknown keys raise TypeError.
        """
        # vars() of an instance includes them
        computed = {name for name, value in vars(cls).items() if isinstance(value, cached_property)}
        given = moved(
            {name: value for name, value in fields.items() if name not in computed}, cls.moved
        )
        for key, default in vars(cls()).items():
            if isinstance(given.get(key), dict):
                given[key] = type(default)(**given[key])
        if given.get("pattern") is not None:
            given["pattern"] = tuple(given["pattern"])
        return cls(**given)
