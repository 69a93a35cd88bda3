"""The model's configuration: plain dataclasses, importable without torch, shared by training, planning and export.

Every field's documentation is its ``doc`` metadata; the loader in ``pretrain`` and the generated page read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIXERS = ("fem_softmax", "transformer")


def setting(default: Any, doc: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A documented dataclass field. ``default`` may be a class, which is then called for each instance."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class FemConfig:
    """Switches and sizes of the Free Energy Mixer; read only where ``model.mixer`` is a FEM."""

    conditioner: bool = setting(True, "C: the time-decay conditioner, which scales q, k, v and the gates' logits by 1 + phi(history).")
    free_energy: bool = setting(True, "L: the free-energy branch F beside the expectation mu.")
    temperature: bool = setting(
        True, "T: learned inverse temperature beta and the inner gate lambda; off: beta = 1 and the read is F alone."
    )
    gate: bool = setting(True, "G: the outer gate g, RMS-normalised over a head's channels.")
    budget: str = setting(
        "i",
        "How 4*hidden_size^2 parameters are shared out: (i) full-width queries and keys, narrower values; (ii) all of one width.",
        ("i", "ii"),
    )
    value_size: int | None = setting(None, "Width d of the values over all heads; null: from the budget.")
    conditioner_size: int | None = setting(None, "Width H_c of the conditioner's state; null: d / 16, at least 4.")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model."""

    mixer: str = setting("fem_softmax", "The token mixer of every layer.", MIXERS)
    hidden_size: int = setting(768, "Width D of the residual stream.")
    num_layers: int = setting(12, "Number of blocks (mixer + SwiGLU MLP).")
    num_attention_heads: int = setting(12, "Heads H of the mixer.")
    ffn_hidden_size: int | None = setting(None, "Inner width of the SwiGLU MLP; null: 8/3 of hidden_size, rounded up to a multiple of 64.")
    vocab_size: int | None = setting(None, "Entries of the tokenizer; null: read from the data's manifest.")
    make_vocab_size_divisible_by: int = setting(128, "The embedding is padded to a multiple of this; independent of the layout.")
    tie_embeddings: bool = setting(False, "Share the input embedding with the output layer.")
    rope: bool = setting(True, "Rotary position embedding on queries and keys.")
    rope_base: int = setting(10000, "Base of the rotary frequencies.")
    norm_eps: float = setting(1e-6, "Epsilon of every norm.")
    init_std: float = setting(0.02, "Standard deviation of the normal initialisation of every matrix.")
    attention_backend: str = setting(
        "auto",
        "auto: torch's fused attention on [v | exp(beta v - r) - kappa] where the values' range allows it, else the exact form; "
        "fused: as auto; reference: always the exact log-sum-exp.",
        ("auto", "fused", "reference"),
    )
    fem: FemConfig = setting(FemConfig, "The Free Energy Mixer's switches and sizes.")

    @property
    def ffn_size(self) -> int:
        """The MLP's inner width, with the default filled in."""
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to make_vocab_size_divisible_by."""
        assert self.vocab_size is not None, "vocab_size is filled in from the data before the model is built"
        step = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // step) * step

    def mixer_shape(self) -> MixerShape:
        """Widths of the mixer's projections (mathematics: budgets (i) and (ii)).

        Raises:
            ValueError: a width is not a whole number of channels a head.
        """
        return MixerShape.of(self)


@dataclass(frozen=True)
class MixerShape:
    """Widths of a FEM mixer; ``transformer`` is the FEM with every switch off.

    With n_T, n_G in {0, 1} for the projections that T and G add, budget (i) spends 2 D^2 on q, k and 2 D^2 on v, o, lambda, g of
    width d = 2D / (2 + n_T + n_G); budget (ii) spends 4 D^2 on all of them at one width d = 4D / (4 + n_T + n_G).
    All switches on gives the paper's D/2 and 2D/3; all off gives standard attention.
    """

    heads: int
    qk_head: int
    value_head: int
    conditioner: int
    free_energy: bool
    temperature: bool
    gate: bool

    @classmethod
    def of(cls, model: ModelConfig) -> MixerShape:
        """The widths that ``model`` asks for. Raises ValueError where the heads do not divide one of them."""
        fem, heads, hidden = model.fem, model.num_attention_heads, model.hidden_size
        plain = model.mixer == "transformer"
        temperature = fem.temperature and fem.free_energy and not plain
        gate = fem.gate and not plain
        extra = int(temperature) + int(gate)
        if fem.budget == "i" or plain:
            qk, exact_value = hidden, (2 * hidden, 2 + extra)
        else:
            qk, exact_value = None, (4 * hidden, 4 + extra)
        if fem.value_size and not plain:
            value = fem.value_size
        else:
            value = exact_value[0] // exact_value[1]
            if value * exact_value[1] != exact_value[0] or value % heads:
                value = max(1, round(exact_value[0] / exact_value[1] / heads)) * heads
        qk = value if qk is None else qk
        for what, width in (("query/key", qk), ("value", value)):
            if width % heads:
                raise ValueError(f"model.num_attention_heads={heads} does not divide the mixer's {what} width {width}")
        conditioner = 0
        if fem.conditioner and not plain:
            conditioner = fem.conditioner_size or max(4, value // 16)
        return cls(heads, qk // heads, value // heads, conditioner, fem.free_energy and not plain, temperature, gate)

    @property
    def value_size(self) -> int:
        """d: value channels over all heads."""
        return self.heads * self.value_head

    @property
    def head_widths(self) -> tuple[int, int, int, int, int]:
        """Channels of q, k, v, lambda-logit, g-logit that one head owns in the packed projection (0: absent)."""
        return (self.qk_head, self.qk_head, self.value_head, self.value_head * self.temperature, self.value_head * self.gate)

    @property
    def head_width(self) -> int:
        """Rows a head owns in the packed input projection."""
        return sum(self.head_widths)
