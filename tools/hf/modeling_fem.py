"""The exported language model for stock transformers: the training code's blocks between an
embedding and an output layer.

This file is copied to every export together with the files that it imports. It may use only torch
and transformers. The blocks contain the mathematics of a mixer and its decoding state; this file
contains the interface that transformers requires, and creates, reorders and clears decoding states.

Long, because transformers requires the classes of a model in one modeling file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fem_megatron.block import Block, PredictionModule
from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.mup import starts_from
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import FIXED, OUTPUT, BlockShape, Normal, Weight, Weights
from fem_megatron.state import Capacity, Context, State

from .configuration_fem import FemLMConfig


class FemCacheLayer(DynamicLayer):
    """Decoding state of one block.

    It contains named tensors, with the batch as first dimension, and the number of tokens that they
    represent.
    """

    is_croppable = False
    supports_early_init = False
    capacity: Capacity | None = None

    def __init__(self) -> None:
        super().__init__()
        self.state: State = {}
        self.tokens = 0

    def before(self, x: Tensor) -> None:
        """Prepare the state for the next call of the block with input x [t, b, hidden]."""

    def after(self, x: Tensor) -> None:
        """Count the tokens of x [t, b, hidden], which the block has just processed."""
        self.tokens += x.shape[0]
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the number of past tokens."""
        return self.tokens

    def get_max_cache_shape(self) -> int:
        """Return -1: the number of tokens is unlimited."""
        return -1

    get_max_length = get_max_cache_shape

    def reset(self) -> None:
        """Clear the state."""
        self.state, self.tokens, self.is_initialized = {}, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Return if the number of tokens is 0; raise ValueError for any other number.

        An earlier state cannot be recovered from a later one.
        """
        if tokens_to_remove != 0:
            raise ValueError("this model's cache cannot return to an earlier step")

    def offload(self) -> None:
        """Raise ValueError: the state must stay on the device of its layer."""
        raise ValueError(
            "this model's cache cannot be offloaded; `python -m pretrain --plan` reports its size"
        )

    prefetch = offload

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raise ValueError: the blocks write their states themselves."""
        raise ValueError(
            "this model's blocks update their states themselves: a FemCache has no keys and values"
            " to update"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search: row i becomes the previous row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows ``indices`` of the batch, in this order."""
        self.state = {name: value[indices.to(value.device)] for name, value in self.state.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch ``repeats`` times."""
        self.state = {
            name: value.repeat_interleave(repeats, dim=0) for name, value in self.state.items()
        }


class FemStaticCacheLayer(FemCacheLayer):
    """Decoding state with a fixed maximum number of tokens."""

    is_compileable = True
    capacity: Capacity

    def __init__(self, places: int) -> None:
        super().__init__()
        self.capacity = Capacity(places, torch.zeros((), dtype=torch.int64))

    def before(self, x: Tensor) -> None:
        """Prepare the state; before the first call, move the token count to the device of x.

        Raises ValueError if the tokens do not fit, or if torch.export would store the token count,
        which every step changes, as a constant.
        """
        if (
            torch.compiler.is_exporting()
            and not torch.compiler.is_dynamo_compiling()
            and type(self.capacity.taken) is Tensor
        ):
            raise ValueError(
                "torch.export(strict=False) would store this cache as a constant: use strict=True, "
                "or assign the module's buffers to layer.state and layer.capacity.taken in its "
                "forward"
            )
        if not self.state and self.capacity.taken.device != x.device:
            self.capacity = Capacity(self.capacity.places, self.capacity.taken.to(x.device))
        if not torch.compiler.is_compiling():
            self.capacity.check(x.shape[0])

    def after(self, x: Tensor) -> None:
        """Add the tokens of x to the count, in place.

        A compiled step refers to the tensor that contains the count, so this tensor must not be
        replaced.
        """
        self.capacity.taken.add_(x.shape[0])
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the number of past tokens. Synchronizes with the device."""
        return int(self.capacity.taken)

    def get_max_cache_shape(self) -> int:
        """Return the maximum number of tokens."""
        return self.capacity.places

    get_max_length = get_max_cache_shape

    def reset(self) -> None:
        """Clear the state."""
        self.state, self.is_initialized = {}, False
        self.capacity.taken.zero_()


class FemCache(Cache):
    """Cache with one FemCacheLayer per block.

    KV caches grow with the text; states of linear-time mixers have a constant size.
    """

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(layers=[FemCacheLayer() for _ in range(config.num_hidden_layers)])

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield one tuple per block with the tensors of its state; empty tuples before the first
        token.
        """
        for layer in self.layers:
            yield tuple(layer.state.values())  # type: ignore[union-attr]

    def __getitem__(self, index: int) -> Any:
        """Raise TypeError: transformers expects keys and values, which this cache does not have."""
        raise TypeError(
            "a FemCache has no keys and values: read cache.layers[i].state, and"
            " cache.get_seq_length() for its tokens"
        )

    @property
    def is_initialized(self) -> bool:
        """True if every block has a state."""
        return all(layer.is_initialized for layer in self.layers)  # type: ignore[union-attr]

    def nbytes(self) -> int:
        """Return the bytes of all tensors in the cache."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.state.values())  # type: ignore[union-attr]


class FemStaticCache(FemCache):
    """FemCache with a fixed size of ``max_cache_len`` tokens.

    All decoding steps have equal shapes, so one step is compiled once and reused. A KV cache
    allocates max_cache_len + 1 positions at the first token, even with a sliding window. The states
    of linear-time mixers have the same size as without a limit.

    Raises:
        ValueError: max_cache_len is below 1 or above the limit of a mixer.
    """

    def __init__(self, config: FemLMConfig, max_cache_len: int) -> None:
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len}: at least 1")
        longest = [
            block.mixer.max_length()
            for block in ModelConfig.from_dict(config.model_fields()).blocks()
        ]
        bounds = [bound for bound in longest if bound is not None]
        if bounds and max_cache_len > min(bounds):
            raise ValueError(
                f"max_cache_len={max_cache_len}, but this model's mixer takes {min(bounds)} tokens"
                " at most"
            )
        Cache.__init__(
            self,
            layers=[FemStaticCacheLayer(max_cache_len) for _ in range(config.num_hidden_layers)],
        )


class Alone(OneProcess):
    """A single process (see OneProcess) that creates parameters without extra attributes.

    transformers 4 would pass such attributes as arguments to the parameter's class.
    """

    def parameter(self, weight: Weight) -> nn.Parameter:
        """Return the parameter that OneProcess creates, without its attributes."""
        return nn.Parameter(super().parameter(weight).data)


class FemBlock(GradientCheckpointingLayer, Block):
    """Block of the training code in one process; its decoding state is in transformers' cache."""

    def __init__(self, shape: BlockShape, layer_idx: int, causal: bool, recurrence: int) -> None:
        super().__init__(shape, Alone(torch.get_default_dtype()))
        self.layer_idx, self.causal, self.recurrence = layer_idx, causal, recurrence
        _remember(self, shape.weights())

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        positions: Tensor,
        valid: Tensor | None = None,
        past_key_values: Cache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Apply the block to x [t, b, hidden] and return a tensor of the same shape.

        positions [t] or [t, b]: positions of the tokens. valid [b, past + t] bool: False at
        padding. past_key_values: the cache, whose entry for this block is updated. documents:
        packed documents, which are used only without a cache.
        """
        layer: Any = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if layer is None:
            return super().forward(
                x, Context(positions, valid, causal=self.causal, documents=documents)
            )
        layer.before(x)
        x = super().forward(
            x,
            Context(
                positions,
                valid,
                state=layer.state,
                past=layer.tokens,
                causal=self.causal,
                capacity=layer.capacity,
            ),
        )
        layer.after(x)
        return x


def _remember(module: nn.Module, weights: Weights) -> None:
    """Store the `Weight` of each parameter, from which ``_init_weights`` initialises it."""
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        owner.starts = {**getattr(owner, "starts", {}), leaf: weight}  # type: ignore[assignment]


class FemLMPreTrainedModel(PreTrainedModel):
    """Base class of the models, with the attributes that transformers requires."""

    config: FemLMConfig
    config_class = FemLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FemBlock", "PredictionModule"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _is_stateful = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the weights of one module as in training."""
        starts: dict[str, Weight] = getattr(module, "starts", {})
        if not starts and isinstance(module, nn.Linear | nn.Embedding):
            full: Any = module.weight
            starts = {
                "weight": Weight(
                    tuple(full.shape), mup=OUTPUT if isinstance(module, nn.Linear) else FIXED
                )
            }
        if starts:
            model = ModelConfig.from_dict(self.config.model_fields())
            for leaf, weight in starts.items():
                start = starts_from(model, weight)
                if isinstance(start, Normal):
                    nn.init.normal_(module.get_parameter(leaf), mean=0.0, std=start.std)
                else:
                    nn.init.constant_(module.get_parameter(leaf), start)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def resize_token_embeddings(self, *given: Any, **named: Any) -> nn.Embedding:
        """Resize the embedding as transformers does, and return it.

        Raises ValueError if the model has a second embedding for velocities, which transformers
        would not resize.
        """
        if getattr(self.base_model, "embed_velocities", None) is not None:
            raise ValueError(
                "this model has a separate embedding for velocities, which is not resized: train"
                " with all tokens"
            )
        made: nn.Embedding = super().resize_token_embeddings(*given, **named)
        return made


class FemLMModel(FemLMPreTrainedModel):
    """Model without an output layer: embedding, blocks and final norm.

    Raises:
        ValueError: sizes in the configuration do not match, or its recurrence is below 1.
    """

    _keys_to_ignore_on_load_unexpected = [r"^mtp_modules\."]

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(config)
        model = ModelConfig.from_dict(config.model_fields())
        if config.recurrence < 1:
            raise ValueError(f"recurrence={config.recurrence}: expected at least 1")
        self.causal, shapes = model.causal, model.blocks()
        self.counts_padding = any(shape.counts_padding() for shape in shapes)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_velocities = (
            nn.Embedding(config.vocab_size, config.hidden_size)
            if model.stream_size > config.hidden_size
            else None
        )
        self.layers = nn.ModuleList(
            FemBlock(shape, i, model.causal, config.recurrence) for i, shape in enumerate(shapes)
        )
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
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Compute the hidden states after the final norm, last_hidden_state [b, t, hidden].

        Args:
            input_ids [b, t] or inputs_embeds [b, t, hidden]: exactly one of them.
            attention_mask [b, past + t]: 0 at padding.
            position_ids [b or 1, t]: None: counted from the mask.
            kwargs: ``cu_seq_lens_q`` (for a single row) or ``seq_idx`` define packed documents.
                Other arguments are ignored, as in transformers' models.

        Wherever position_ids do not increase by one, a new document begins, which is read
        separately. This is transformers' convention for packed documents, which have no padding and
        no cache.

        Raises:
            ValueError: not exactly one input; a mask of another length; a cache that is not a
            FemCache or is passed to an encoder; packed documents with a cache or padding, or
            defined in two contradicting ways; padding inside the text of a row if the model counts
            it; attention maps or another reading direction are requested.
        """
        if output_attentions:
            raise ValueError("output_attentions: this model has no attention maps to show")
        if kwargs.get("is_causal") not in (None, self.causal):
            raise ValueError(
                f"is_causal={kwargs['is_causal']}: this model was built with"
                f" model.causal={self.causal}; leave it out"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is not None and self.embed_velocities is not None:
            raise ValueError(
                "inputs_embeds: this model also needs velocities, from a separate embedding of"
                " the tokens; give input_ids"
            )
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        borders = _borders(kwargs, x)
        if past_key_values is not None and borders is not None:
            raise ValueError(
                "past_key_values and cu_seq_lens_q or seq_idx: packed documents have no decoding"
                " state; leave one of them out"
            )
        documents = (
            _packed(borders, position_ids, attention_mask, x) if past_key_values is None else None
        )
        if documents is not None and use_cache:
            raise ValueError(
                "use_cache=True: this sequence packs several documents, which have no decoding"
                " state"
            )
        if documents is not None and position_ids is None:
            position_ids = documents.positions.T
        cache = None if documents is not None else self._cache(past_key_values, use_cache)
        valid, positions = _placed(cache, attention_mask, position_ids, x, self.counts_padding)
        x = x.transpose(0, 1).contiguous()
        wanted = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        states: list[Tensor] = []
        for block in self.layers:
            if wanted:
                states.append(x[..., : self.config.hidden_size].transpose(0, 1))
                # The block reads the tensor that is returned, so that it receives a gradient.
                shown = states[-1].transpose(0, 1)
                x = (
                    shown
                    if self.embed_velocities is None
                    else torch.cat((shown, x[..., self.config.hidden_size :]), dim=-1)
                )
            x = block(
                x, positions=positions, valid=valid, past_key_values=cache, documents=documents
            )
        x = self.norm(x[..., : self.config.hidden_size]).transpose(0, 1)
        hidden = (*states, x) if wanted else None
        output = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=cache, hidden_states=hidden
        )
        return output if return_dict is not False else output.to_tuple()

    def embed(self, input_ids: Any) -> Tensor:
        """Return the stream of tokens [b, t] before the first block, with velocities if any."""
        x: Tensor = self.embed_tokens(input_ids)
        if self.embed_velocities is not None:
            x = torch.cat((x, self.embed_velocities(input_ids)), dim=-1)
        return x

    def _cache(self, given: Any, use_cache: bool | None) -> Any:
        """Return the cache that this call updates.

        It is ``given`` unless None, else a new one. The result is None if no cache is given and
        ``use_cache`` is False or the model is not causal. Raises ValueError if the model cannot use
        the given cache.
        """
        if given is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            return FemCache(self.config) if use_cache and self.causal else None
        if not self.causal:
            raise ValueError(
                "this model is not causal, so it has no cache: leave past_key_values out"
            )
        # Checked by attributes: a cache created by another folder's code has a different class.
        if not given.layers or not all(hasattr(layer, "state") for layer in given.layers):
            raise ValueError(
                f"past_key_values is a {type(given).__name__}; this model needs its own"
                " FemCache(config)"
            )
        return given


class FemLMForCausalLM(FemLMPreTrainedModel, GenerationMixin):
    """Language model: FemLMModel and the output layer.

    mtp_modules: modules of multi-token prediction that the export kept, which ``forward`` does not
    use; absent if there are none.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    largest_static_cache = 0

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(config)
        self.model = FemLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        model = ModelConfig.from_dict(config.model_fields())
        if model.mtp_depth:
            shape, alone = model.mtp, Alone(torch.get_default_dtype())
            self.mtp_modules = nn.ModuleList(
                PredictionModule(
                    shape, FemBlock(shape.block, k, model.causal, config.recurrence), alone
                )
                for k in range(model.mtp_depth)
            )
            for module in self.mtp_modules:
                _remember(module, shape.own_weights())
        self.post_init()

    def new_cache(self, max_cache_len: int | None = None) -> FemCache:
        """Return an empty cache for ``generate(..., past_key_values=...)`` over several turns.

        max_cache_len: its fixed size in tokens; None: it grows with the text.
        """
        if max_cache_len is None:
            return FemCache(self.config)
        return FemStaticCache(self.config, max_cache_len)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raise ValueError: continuous batching needs a paged cache of keys and values.

        ``generate_batch`` and the context manager of transformers call this method and fail too.
        """
        raise ValueError(
            "continuous batching needs a paged cache of keys and values, which this model does not"
            " have: call generate() with a padded batch"
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Add the cache for ``generate`` to ``model_kwargs`` (hook of transformers).

        ``cache_implementation`` may be None, "dynamic" or "static"; alternatively the caller passes
        a cache.

        Raises ValueError for another implementation, for an implementation together with a cache,
        and for generation methods that would return to an earlier step.
        """
        kind = generation_config.cache_implementation
        given = model_kwargs.get("past_key_values")
        if generation_mode in ("assisted_generation", "contrastive_search", "dola_generation"):
            raise ValueError(
                "this model's cache cannot return to an earlier step, which"
                f" {generation_mode.value} requires"
            )
        if given is not None:
            if kind is not None:
                raise ValueError(
                    f"cache_implementation={kind!r} and past_key_values: give one of them"
                )
            self.model._cache(given, True)  # check it before a mask is created for it
            return
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={kind!r}: this model supports 'dynamic' (the default) and"
                " 'static'"
            )
        if generation_config.use_cache is not False and self.model.causal:
            longest = max(
                max_cache_length,
                getattr(generation_config, "max_cache_len", None) or 0,
                self.largest_static_cache,
            )
            model_kwargs["past_key_values"] = self.new_cache(longest if kind == "static" else None)
            if kind == "static":
                # Later caches have at least this size, so that the compiled step can be reused.
                self.largest_static_cache = longest

    def _prepare_position_ids_for_generation(self, *_: Any, **__: Any) -> None:
        """Return None (hook of transformers since 5.0).

        ``forward`` then counts the positions from the mask at every step.
        """

    def create_masks_for_generate(
        self,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the attention mask, extended to the size of the static cache (hook of
        transformers).

        With the same shape at every step, the step is compiled only once. transformers 5 passes no
        mask for a batch without padding; then the mask consists of ones.
        """
        if attention_mask is None and inputs_embeds is None:
            return None
        known = (
            inputs_embeds.new_ones(inputs_embeds.shape[:2])  # type: ignore[union-attr]
            if attention_mask is None
            else attention_mask
        )
        return pad(
            known.to(torch.bool),
            (0, max(0, past_key_values.layers[0].capacity.places - known.shape[1])),
            value=True,
        )

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
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run FemLMModel and the output layer.

        Args:
            labels [b, t]: token ids, -100 where ignored; this method shifts them by one token.
            logits_to_keep: number of last positions, or indices of positions, with logits; 0: all.
            kwargs: also passed to transformers' loss function (num_items_in_batch, shift_labels).

        Returns:
            loss, a scalar or None without labels, and logits [b, t or logits_to_keep, vocab_size].
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output if return_dict is not False else output.to_tuple()


# The Trainer of transformers decides by the class name whether it must shift the labels itself
# (label_smoothing_factor).
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FemLMConfig.model_type] = FemLMForCausalLM.__name__


def _placed(
    cache: Any, attention_mask: Tensor | None, position_ids: Tensor | None, x: Tensor, gapless: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the mask and the positions that the blocks need for the new tokens x [b, t, hidden].

    Args:
        position_ids [b or 1, t]: None: tokens are counted from 0, without the padding before them.
        gapless: raise ValueError if padding is between two tokens of a row.

    Returns:
        The mask of `Context.valid` or None; positions [t] or [t, b].
    """
    batch, length = x.shape[:2]
    capacity: Capacity | None = None if cache is None else cache.layers[0].capacity
    if capacity is not None and cache.layers[0].state:
        return _placed_within_capacity(capacity, attention_mask, position_ids, x, gapless)
    past = 0 if cache is None or capacity is not None else cache.get_seq_length()
    if (
        capacity is not None
        and attention_mask is not None
        and attention_mask.shape[-1] == capacity.places
    ):
        attention_mask = attention_mask[:, :length]
    if attention_mask is not None and attention_mask.shape != (batch, past + length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; this model needs [{batch},"
            f" {past + length}] (past and new tokens)"
        )
    valid = None if attention_mask is None else attention_mask.to(torch.bool)
    # A compiled step must be the same with and without padding.
    if valid is not None and not torch.compiler.is_compiling() and bool(valid.all()):
        valid = None
    if gapless and valid is not None:
        _check_gaps(valid)
    if position_ids is None and valid is None:
        return None, torch.arange(past, past + length, device=x.device)
    if position_ids is None:
        assert valid is not None
        position_ids = _counted(valid)[:, past:]
    return valid, _by_token(position_ids)


def _borders(given: dict[str, Any], x: Tensor) -> Tensor | None:
    """Return [b, t] bool on the CPU, True at the first token of each document in x [b, t, hidden].

    None if ``given`` contains none of these arguments of ``forward``:

    - cu_seq_lens_q, cu_seq_lens_k: 0, then the end of each document of a single row;
    - seq_idx [1 or b, t]: the document number of each token.

    Raises ValueError if they do not fit x or contradict each other.
    """
    batch, length = x.shape[:2]
    found: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if given.get(name) is not None:
            ends = torch.as_tensor(given[name]).flatten().long().cpu()
            if (
                batch != 1
                or len(ends) < 2
                or (int(ends[0]), int(ends[-1])) != (0, length)
                or bool((ends.diff() < 0).any())
            ):
                raise ValueError(
                    f"{name} does not increase from 0 to the {length} tokens of one row: flatten"
                    " the batch without padding"
                )
            found[name] = torch.zeros(1, length, dtype=torch.bool).index_fill_(
                1, ends[(ends > 0) & (ends < length)], True
            )
    numbers = given.get("seq_idx")
    if numbers is not None:
        if numbers.shape not in ((1, length), (batch, length)):
            raise ValueError(
                f"seq_idx has shape {tuple(numbers.shape)}; this model needs [1 or {batch},"
                f" {length}]"
            )
        found["seq_idx"] = pad(numbers.expand(batch, length).diff(dim=1) != 0, (1, 0)).cpu()
    borders = list(found.values())
    if any(not torch.equal(borders[0], other) for other in borders):
        raise ValueError(
            f"{' and '.join(found)} start documents at different positions: give only one of them"
        )
    return borders[0] if borders else None


def _packed(
    borders: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None, x: Tensor
) -> Documents | None:
    """Return the packed documents of x [b, t, hidden]; None if each sequence is one document.

    Documents are defined by ``borders`` (the result of `_borders`) and by position_ids [b or 1, t].
    Raises ValueError if the two contradict each other, or if padded sequences contain several
    documents or decreasing positions.
    """
    if position_ids is None and borders is None:
        return None
    begins = borders
    positions = None if position_ids is None else position_ids.expand(x.shape[:2])
    if attention_mask is None or attention_mask.shape != x.shape[:2] or bool(attention_mask.all()):
        if positions is not None:
            jumps = pad(positions.diff(dim=1) != 1, (1, 0)).cpu()
            begins = jumps if borders is None else borders
            if bool((jumps & ~begins).any()):
                raise ValueError(
                    "position_ids do not increase by one inside a document of cu_seq_lens_q or"
                    " seq_idx: leave one of them out"
                )
        if begins is None or not bool(begins.any()):
            return None
        return Documents.of(begins).to(x.device)
    back = False
    if positions is not None:
        highest = positions.masked_fill(attention_mask == 0, -1).cummax(dim=1).values
        back = bool(((positions[:, 1:] <= highest[:, :-1]) & (attention_mask[:, 1:] != 0)).any())
    if back or (borders is not None and bool(borders.any())):
        raise ValueError(
            "this sequence packs several documents, and attention_mask has padding: leave the"
            " mask out"
        )
    return None


def _placed_within_capacity(
    capacity: Capacity,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    x: Tensor,
    gapless: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result of `_placed` for a static cache that already contains tokens.

    capacity: size and token count of the cache. attention_mask [b, at most the size of the cache]
    or None.
    """
    batch, length = x.shape[:2]
    if not torch.compiler.is_compiling():
        capacity.check(length)
    known = None if attention_mask is None else attention_mask.to(torch.bool)
    if known is not None and (
        known.dim() != 2 or known.shape[0] != batch or known.shape[1] > capacity.places
    ):
        raise ValueError(
            f"attention_mask has shape {tuple(known.shape)}; this model and cache need [{batch}, up"
            f" to {capacity.places}]"
        )
    if gapless and known is not None and not torch.compiler.is_compiling():
        _check_gaps(known[:, : int(capacity.taken) + length])
    valid = capacity.valid(known, batch, length, x.device)
    if position_ids is None:
        position_ids = _counted(valid)[:, capacity.places :]
    return valid, _by_token(position_ids)


def _counted(valid: Tensor) -> Tensor:
    """Return the position of each token of valid [b, n], counted without padding.

    Padding has position 1, as in transformers 4.
    """
    return (valid.long().cumsum(dim=-1) - 1).masked_fill(~valid, 1)


def _check_gaps(valid: Tensor) -> None:
    """Raise ValueError if padding is between two tokens of a row of valid [b, n].

    Synchronizes with the device; returns at once in compiled code.
    """
    if not torch.compiler.is_compiling() and bool(
        ((valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0] > 1).any()
    ):
        raise ValueError(
            "attention_mask has padding between two tokens of a row, which this model's mixer"
            " counts as positions: pad only on the left, and start a new cache with the text"
            " without that padding"
        )


def _by_token(position_ids: Tensor) -> Tensor:
    """Convert position_ids [1, t] to [t], and [b, t] with b > 1 to [t, b]."""
    return position_ids[0] if position_ids.shape[0] == 1 else position_ids.T.contiguous()
