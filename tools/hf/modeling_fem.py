"""The exported language model, for stock transformers: the training code's own blocks between an embedding and an output layer.

Copied beside the weights of every export together with the files that it imports, and nothing else of the project: torch and transformers
are all that it may need. A mixer's mathematics, its decoding state included, is in the blocks; here is what transformers asks of a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fem_megatron.config import ModelConfig
from fem_megatron.layers.block import Block
from fem_megatron.layers.parallel import OneProcess
from fem_megatron.layers.update import Context, State
from fem_megatron.shapes.base import Normal
from fem_megatron.shapes.block import BlockShape

from .configuration_fem import FemLMConfig


class FemCacheLayer(DynamicLayer):
    """One block's decoding state: named tensors, the batch first, and how many tokens they stand for."""

    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State = {}
        self.tokens = 0

    def get_seq_length(self) -> int:
        """Tokens of the past."""
        return self.tokens

    def reset(self) -> None:
        """Forgets the past."""
        self.state, self.tokens = {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes nothing: the state of an earlier step cannot be recovered from a later one."""
        if tokens_to_remove != 0:
            raise ValueError("this model's cache cannot go back to an earlier step")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch, in this order."""
        self.state = {name: value[indices.to(value.device)] for name, value in self.state.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        self.state = {name: value.repeat_interleave(repeats, dim=0) for name, value in self.state.items()}


class FemCache(Cache):
    """One FemCacheLayer for each block."""

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(layers=[FemCacheLayer() for _ in range(config.num_hidden_layers)])


class FemBlock(GradientCheckpointingLayer, Block):
    """A block of the training code, in one process, that finds its decoding state in transformers' cache."""

    def __init__(self, shape: BlockShape, layer_idx: int, causal: bool, recurrence: int) -> None:
        super().__init__(shape, OneProcess(torch.get_default_dtype()))
        self.layer_idx, self.causal, self.recurrence = layer_idx, causal, recurrence
        for name, weight in shape.weights().items():
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            owner.starts = {**getattr(owner, "starts", {}), leaf: weight.init}  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, x: Tensor, positions: Tensor, valid: Tensor | None = None, past_key_values: Cache | None = None
    ) -> Tensor:
        """x [t, b, hidden] -> same shape; positions [t] or [t, b]; valid [b, past + t] bool, False at padding."""
        layer: Any = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if layer is None:
            return super().forward(x, Context(positions, valid, causal=self.causal))
        x = super().forward(x, Context(positions, valid, state=layer.state, past=layer.tokens, causal=self.causal))
        layer.tokens += x.shape[0]
        return x


class FemLMPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every model here."""

    config: FemLMConfig
    config_class = FemLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FemBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        """As the training code starts: what a block's shape says of each of its weights."""
        if hasattr(module, "starts"):
            starts: dict[str, Any] = module.starts  # type: ignore[assignment]
            for leaf, start in starts.items():
                if isinstance(start, int | float):
                    nn.init.constant_(module.get_parameter(leaf), start)
                else:
                    std = start.std if isinstance(start, Normal) else self.config.initializer_range
                    nn.init.normal_(module.get_parameter(leaf), mean=0.0, std=std)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


class FemLMModel(FemLMPreTrainedModel):
    """Embedding, blocks, final norm.

    Raises:
        ValueError: the configuration's sizes do not fit together, or its recurrence is under 1.
    """

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(config)
        model = ModelConfig.from_dict(config.model_fields())
        if config.recurrence < 1:
            raise ValueError(f"recurrence={config.recurrence}: every block is applied at least once")
        self.causal = model.causal
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FemBlock(shape, i, model.causal, config.recurrence) for i, shape in enumerate(model.blocks()))
        self.norm = nn.RMSNorm(config.hidden_size, eps=model.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """input_ids [b, t] or inputs_embeds [b, t, hidden]; attention_mask [b, past + t], 0 at padding -> last_hidden_state [b, t, hidden].

        Raises:
            ValueError: not exactly one input, a mask of another length, a cache that is not a FemCache, or is given to an encoder.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        valid = _valid(attention_mask, past + x.shape[1])
        positions = _positions(position_ids, valid, past, x)
        x = x.transpose(0, 1).contiguous()
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] = []
        for block in self.layers:
            if wanted:
                states.append(x.transpose(0, 1))
            x = block(x, positions=positions, valid=valid, past_key_values=cache)
        x = self.norm(x).transpose(0, 1)
        hidden = (*states, x) if wanted else None
        output = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=hidden)
        return output if return_dict is not False else output.to_tuple()

    def _cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache that this call fills: the given one, a new one, or none."""
        if given is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            return FemCache(self.config) if use_cache and self.causal else None
        if not self.causal:
            raise ValueError("this model sees all tokens at once, so it has no cache: leave past_key_values out")
        if not given.layers or not all(hasattr(layer, "state") for layer in given.layers):
            raise ValueError(f"past_key_values is a {type(given).__name__}; this model needs its own FemCache(config)")
        return given


class FemLMForCausalLM(FemLMPreTrainedModel, GenerationMixin):
    """The language model: FemLMModel and the output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(config)
        self.model = FemLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: ``generate`` leaves the cache to the first forward call, which makes a FemCache."""
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As FemLMModel's; labels [b, t] (-100: ignored) are shifted here -> loss [], logits [b, t or logits_to_keep, vocab_size]."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return output if return_dict is not False else output.to_tuple()


def _valid(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """The mask as bool, None where nothing is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; this model needs [batch, {length}] (past and new tokens)"
        )
    valid = attention_mask.to(torch.bool)
    return None if bool(valid.all()) else valid


def _positions(position_ids: Tensor | None, valid: Tensor | None, past: int, x: Tensor) -> Tensor:
    """Positions of the new tokens, [t] or [t, b]; unless given (as [b or 1, t]) counted without the padding before them."""
    if position_ids is None and valid is None:
        return torch.arange(past, past + x.shape[1], device=x.device)
    if position_ids is None:
        assert valid is not None
        position_ids = (valid.long().cumsum(dim=-1) - 1).clamp_min(0)[:, past:]
    return position_ids[0] if position_ids.shape[0] == 1 else position_ids.T.contiguous()
