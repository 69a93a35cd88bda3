"""The configuration that an exported model carries; copied beside its weights with the torch-free files that it imports."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, ClassVar

from transformers import PretrainedConfig

from fem_megatron.config import ModelConfig

DEFAULT_VOCABULARY = 32000


class FemLMConfig(PretrainedConfig):
    """A decoder-only language model of blocks of any mixer, as the training code describes it, under transformers' names.

    Args:
        architecture: fields of the training code's ModelConfig, as a plain dictionary; those left out have its defaults.
        vocab_size: entries of the tokenizer, rows of the embedding.
        hidden_size: width D of the residual stream.
        num_hidden_layers: blocks (mixer + MLP).
        num_attention_heads: heads of the mixer.
        initializer_range: standard deviation of the normal initialisation.
        tie_word_embeddings: the output layer is the input embedding.
        recurrence: how often every block is applied; may be more than in training, which ``architecture`` tells.
        max_position_embeddings: context length in training (for information: nothing here is bounded by it).
        use_cache: return the decoding state for the next call, unless the model is training.

    Those from vocab_size to recurrence are in ``architecture``, too, under the training code's names; given here, they win.

    Raises:
        ValueError: sizes do not fit together. TypeError: ``architecture`` has an unknown key.
    """

    model_type = "fem_lm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    training_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        num_hidden_layers: int | None = None,
        num_attention_heads: int | None = None,
        initializer_range: float | None = None,
        tie_word_embeddings: bool | None = None,
        recurrence: int | None = None,
        max_position_embeddings: int = 4096,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "vocab_size": vocab_size,
            "num_layers": num_hidden_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "init_std": initializer_range,
            "tie_embeddings": tie_word_embeddings,
        }
        fields = {**(architecture or {}), **{key: value for key, value in given.items() if value is not None}}
        if fields.get("vocab_size") is None:
            fields["vocab_size"] = DEFAULT_VOCABULARY
        model = ModelConfig.from_dict(fields)
        model.blocks()
        self.architecture = json.loads(json.dumps(asdict(model)))
        for theirs, ours in self.training_names.items():
            setattr(self, theirs, self.architecture[ours])
        self.recurrence = model.recurrence if recurrence is None else recurrence
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        # Assigned as well as passed on: which of these the base class keeps depends on the version of transformers.
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        kwargs.update(tokens, tie_word_embeddings=model.tie_embeddings)
        super().__init__(**kwargs)

    def model_fields(self) -> dict[str, Any]:
        """``architecture`` with what was changed since under transformers' names (a resized vocabulary)."""
        return {**self.architecture, **{ours: getattr(self, theirs) for theirs, ours in self.training_names.items()}}

    def model(self) -> ModelConfig:
        """The training code's configuration of the model as it is now, ``recurrence`` included."""
        return replace(ModelConfig.from_dict(self.model_fields()), recurrence=self.recurrence)
