"""The configuration that an exported model carries; copied beside its weights. Imports transformers alone, never this project."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig


class FemLMConfig(PretrainedConfig):
    """Sizes and switches of a decoder-only language model whose token mixer is the Free Energy Mixer over a softmax prior.

    With ``free_energy``, ``temperature``, ``gate`` off and ``conditioner_size`` 0 the mixer is standard attention.

    Args:
        vocab_size: entries of the tokenizer, rows of the embedding.
        hidden_size: width D of the residual stream.
        intermediate_size: inner width of the SwiGLU MLP.
        num_hidden_layers: blocks (mixer + MLP).
        num_attention_heads: heads of the mixer.
        qk_head_dim: channels of a head's queries and keys.
        value_head_dim: channels of a head's values, gates and inverse temperatures.
        conditioner_size: C, width of the time-decay conditioner's state; 0: no conditioner.
        free_energy: L, the free-energy branch F beside the expectation mu.
        learned_temperature: T, learned inverse temperature and inner gate lambda; off: beta = 1 and the read is F alone.
        gate: G, the outer gate g.
        rope: rotary position embedding on queries and keys.
        rope_base: base of the rotary frequencies.
        norm_eps: epsilon of every norm.
        initializer_range: standard deviation of the normal initialisation.
        attention_backend: "auto" or "fused": torch's fused attention on [v | exp(beta v - r) - kappa] where the values' range allows it,
            else the exact form; "reference": always the exact log-sum-exp.
        max_position_embeddings: context length in training (for information: nothing here is bounded by it).
        use_cache: return keys, values and the conditioner's state for the next call, unless the model is training.
        tie_word_embeddings: the output layer is the input embedding.
    """

    model_type = "fem_lm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        qk_head_dim: int = 64,
        value_head_dim: int = 32,
        conditioner_size: int = 24,
        free_energy: bool = True,
        learned_temperature: bool = True,
        gate: bool = True,
        rope: bool = True,
        rope_base: float = 10000.0,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        attention_backend: str = "auto",
        max_position_embeddings: int = 4096,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if attention_backend not in ("auto", "fused", "reference"):
            raise ValueError(f"attention_backend={attention_backend!r} is none of auto, fused, reference")
        if learned_temperature and not free_energy:
            raise ValueError("learned_temperature=True needs free_energy=True: lambda weighs the free-energy branch")
        if rope and qk_head_dim % 2:
            raise ValueError(f"qk_head_dim={qk_head_dim} is odd: rotary position embedding pairs its channels")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.qk_head_dim = qk_head_dim
        self.value_head_dim = value_head_dim
        self.conditioner_size = conditioner_size
        self.free_energy = free_energy
        self.learned_temperature = learned_temperature
        self.gate = gate
        self.rope = rope
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.attention_backend = attention_backend
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        # Assigned as well as passed on: which of these the base class keeps depends on the version of transformers.
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        kwargs.update(tokens, tie_word_embeddings=tie_word_embeddings)
        super().__init__(**kwargs)

    @property
    def head_widths(self) -> tuple[int, int, int, int, int]:
        """Channels of q, k, v, lambda-logit, g-logit that one head owns in the packed projection (0: absent)."""
        value = self.value_head_dim
        return (self.qk_head_dim, self.qk_head_dim, value, value * self.learned_temperature, value * self.gate)
