"""The exported language model: blocks of a Free Energy Mixer over a softmax prior and a SwiGLU MLP, for stock transformers.

Copied beside the weights of every export: imports torch and transformers, never this project, and is one file (longer than others are)
so that who downloads a model has one to read. Symbols are those of the FEM paper: mu the expectation under the prior, F the free energy,
beta the inverse temperature, lambda the inner gate, g the outer gate, phi the conditioner's factor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_fem import FemLMConfig

BETA_OFFSET = 1.8
FUSED_RANGE = 80.0
"""The fused form is exact while beta v of every channel spans no more than this (its exponentials stay within float32)."""
SHIFT_RANGE = 5.0
"""Channels that span less use kappa = 1, whose rounding does not grow as beta shrinks."""
LOWEST_Y = math.expm1(-SHIFT_RANGE / 2)
"""y = E[exp(x)] - 1 of such a channel is not less; only rounding can put it there."""
EXACT_READ_ELEMENTS = 1 << 25
"""Largest [batch, heads, queries, keys, channels] intermediate of the exact form; queries are read in pieces to stay under it."""


class FemCacheLayer(DynamicLayer):
    """Keys (after RoPE) and values of the past, and the conditioner's state s [b, H_c], which stands for the whole past."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def reset(self) -> None:
        """Forgets the past."""
        self.keys = self.values = self.state = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes nothing: the state of an earlier step cannot be recovered from a later one."""
        if tokens_to_remove != 0:
            raise ValueError("a cache with a conditioner's state cannot go back to an earlier step")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch, in this order."""
        super().batch_select_indices(indices)
        if self.state is not None:
            self.state = self.state[indices.to(self.state.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        super().batch_repeat_interleave(repeats)
        if self.state is not None:
            self.state = self.state.repeat_interleave(repeats, dim=0)


class FemCache(Cache):
    """One FemCacheLayer for each block."""

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(layers=[FemCacheLayer() for _ in range(config.num_hidden_layers)])


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroLinear(nn.Linear):
    """A Linear that a new model starts at zero."""


class TimeDecayConditioner(nn.Module):
    """C: phi = (r * LayerNorm(s)) W_out, s_t = exp(a_t) s_{t-1} + f_t; every projection of the mixer is multiplied by 1 + phi.

    Rows of ``in_proj`` come in threes: a, f, r of one channel of the state.
    """

    def __init__(self, config: FemLMConfig, output_size: int) -> None:
        super().__init__()
        self.size = config.conditioner_size
        self.eps = config.norm_eps
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        self.in_proj = nn.Linear(config.hidden_size, 3 * self.size, bias=False)
        self.state_norm = nn.LayerNorm(self.size, eps=config.norm_eps, bias=False)
        self.out_proj = ZeroLinear(self.size, output_size, bias=False)

    def forward(self, h: Tensor, valid: Tensor | None, cache: FemCacheLayer | None) -> Tensor:
        """h [b, t, hidden], valid [b, t] bool or None (all) -> phi [b, t, output_size]. Positions that are not valid leave s as it is."""
        a, f, r = at_least_float32(self.in_proj(self.norm(h))).unflatten(-1, (self.size, 3)).unbind(-1)
        a = -F.softplus(a)
        if valid is not None:
            a, f = a * valid[..., None], f * valid[..., None]
        s = time_decay_scan(a, f, None if cache is None else cache.state)
        if cache is not None:
            cache.state = s[:, -1].clone()
        r = F.softplus(r)
        r = r * (self.size**0.5 / r.norm(dim=-1, keepdim=True).clamp_min(self.eps))
        s = F.layer_norm(s, (self.size,), self.state_norm.weight.to(s.dtype), None, self.eps)
        return self.out_proj((r * s).to(h.dtype))


class FemMixer(nn.Module):
    """o = g * ((1 - lambda) mu + lambda F), y = o W_O, with mu and F read under a softmax prior.

    Rows of ``in_proj`` (and of the conditioner's ``out_proj``) are head-major: for each head q, k, v, lambda-logit (T), g-logit (G).
    """

    def __init__(self, config: FemLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.head_widths = config.num_attention_heads, config.head_widths
        packed = self.heads * sum(self.head_widths)
        value_size = self.heads * config.value_head_dim
        self.in_proj = nn.Linear(config.hidden_size, packed, bias=False)
        self.out_proj = nn.Linear(value_size, config.hidden_size, bias=False)
        self.tdc = TimeDecayConditioner(config, packed) if config.conditioner_size else None
        self.beta = nn.Parameter(torch.zeros(value_size)) if config.learned_temperature else None

    def forward(self, h: Tensor, angles: Tensor | None, keys_valid: Tensor | None, past_key_values: Cache | None) -> Tensor:
        """h [b, t, hidden], angles [b or 1, t, qk_head_dim / 2], keys_valid [b, past + t] bool or None (all) -> y [b, t, hidden]."""
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        z = self.in_proj(h)
        if self.tdc is not None:
            valid = None if keys_valid is None else keys_valid[:, -h.shape[1] :]
            z = z * (1 + self.tdc(h, valid, layer))
        q, k, v, lam, gate = z.unflatten(-1, (self.heads, -1)).transpose(1, 2).split(self.head_widths, dim=-1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        beta = self.inverse_temperature()
        if beta is None:
            o = attention(q, k, v, keys_valid)
        else:
            mu, gap = fem_read(q, k, v, beta, keys_valid, self.config.attention_backend)
            o = mu + torch.sigmoid(lam) * gap if self.config.learned_temperature else mu + gap
        if self.config.gate:
            o = o * F.rms_norm(F.softplus(gate), gate.shape[-1:], None, self.config.norm_eps)
        return self.out_proj(o.to(h.dtype).transpose(1, 2).flatten(2))

    def inverse_temperature(self) -> Tensor | None:
        """beta [heads, value_head_dim], float32 or wider: softplus(b + 1.8), ones where T is off, None where L is off."""
        if not self.config.free_energy:
            return None
        shape = (self.heads, self.config.value_head_dim)
        weight = self.in_proj.weight
        if self.beta is None:
            return torch.ones(shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        return F.softplus(at_least_float32(self.beta) + BETA_OFFSET).view(shape)


class SwiGLU(nn.Module):
    """down( silu(gate) * up ); rows of ``gate_up_proj``: gate, then up."""

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class FemBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: FemLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = FemMixer(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, angles: Tensor | None = None, keys_valid: Tensor | None = None, past_key_values: Cache | None = None
    ) -> Tensor:
        """x [b, t, hidden] -> same shape; the rest as FemMixer's."""
        x = x + self.self_attn(self.input_layernorm(x), angles, keys_valid, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


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
        if isinstance(module, ZeroLinear):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, FemMixer) and module.beta is not None:
            nn.init.zeros_(module.beta)


class FemLMModel(FemLMPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FemBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
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
            ValueError: not exactly one input, a mask of another length, a cache that is not a FemCache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None:
            past_key_values = FemCache(self.config) if use_cache else None
        elif not all(hasattr(layer, "state") for layer in past_key_values.layers) or not past_key_values.layers:
            raise ValueError(f"past_key_values is a {type(past_key_values).__name__}; this model needs its own FemCache(config)")
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        keys_valid = _keys_valid(attention_mask, past + x.shape[1])
        if position_ids is None:
            position_ids = _positions(keys_valid, past, x)
        angles = _rotary_angles(position_ids, self.config, x.dtype) if self.config.rope else None
        states = [x]
        for block in self.layers:
            x = block(x, angles=angles, keys_valid=keys_valid, past_key_values=past_key_values)
            states.append(x)
        x = self.norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values, hidden_states=(*states[:-1], x) if wanted else None
        )
        return output if return_dict is not False else output.to_tuple()


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


def fem_read(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, keys_valid: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """mu = sum_i p_t(i) v_i and the gap F - mu, F = log(sum_i p_t(i) exp(beta v_i)) / beta, under the causal softmax prior p.

    q [b, h, tq, dk] are the last tq positions of k [b, h, tk, dk], v [b, h, tk, dv]; beta [h, dv] > 0; keys_valid [b, tk] bool, None: all.
    Returns mu and the gap [b, h, tq, dv], float32 or wider. With ``backend`` other than "reference" torch's fused attention reads both at
    once, unless beta v spans more than FUSED_RANGE or there is one query (the exact form, good for any values, then costs no more).
    """
    if backend != "reference" and q.shape[2] > 1:
        low, high = at_least_float32(v.detach()).aminmax(dim=2, keepdim=True)
        spread = beta.detach()[:, None] * (high - low)
        if spread.max().item() <= FUSED_RANGE:
            return _fused_read(q, k, v, beta, (low + high) / 2, spread < SHIFT_RANGE, keys_valid)
    return _exact_read(q, k, v, beta, keys_valid)


def _fused_read(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor, keys_valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over [v | U]. The centre of a channel's range cancels out of F; with x = beta (v - centre):

    kappa = 0:  U = exp(x)                                              F - mu = log(Z) / beta - (mu - centre)
    kappa = 1:  U = exp(x) - 1 - x,  y = beta (mu - centre) + Z         F - mu = (log1p(y) - y + Z) / beta

    kappa = 1 where ``shifted``: U is what goes beyond the mean, so a small gap keeps its digits.
    """
    dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    x = beta[:, None] * (at_least_float32(v) - centre)
    u = torch.where(shifted, torch.expm1(x) - x, torch.exp(x))
    packed = torch.cat((v.to(dtype), u.to(dtype)), dim=-1)
    mu, z = at_least_float32(attention(q.to(dtype), k.to(dtype), packed, keys_valid)).chunk(2, dim=-1)
    offset = mu - centre
    # Each logarithm is of a constant where the other is meant, so that neither brings a NaN into the other's gradient.
    y = torch.where(shifted, beta[:, None] * offset + z, 0.0).clamp_min(LOWEST_Y)
    log_z = torch.log(torch.where(shifted, 1.0, z))
    gap = torch.where(shifted, (torch.log1p(y) - y + z) / beta[:, None], log_z / beta[:, None] - offset)
    return mu, gap.clamp_min(0.0)


def _exact_read(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, keys_valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of log p + beta v with its own maximum for each query and channel, a piece of the queries at a time."""
    tq, tk = q.shape[2], k.shape[2]
    rows = max(1, EXACT_READ_ELEMENTS // max(1, v.numel()))
    reads = []
    for start in range(0, tq, rows):
        piece = q[:, :, start : start + rows]
        allowed = _allowed(tk - tq + start, piece.shape[2], tk, keys_valid, q.device)
        if torch.is_grad_enabled() and tq > rows:
            reads.append(checkpoint(_exact_piece, piece, k, v, beta, allowed, use_reentrant=False))
        else:
            reads.append(_exact_piece(piece, k, v, beta, allowed))
    mu, gap = (torch.cat(parts, dim=2) for parts in zip(*reads, strict=True))
    return mu, gap


def _exact_piece(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    v, beta = at_least_float32(v), beta[:, None]
    scores = at_least_float32(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    log_p = scores.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
    mu = log_p.exp() @ v
    return mu, torch.logsumexp(log_p[..., None] + (beta * v)[:, :, None], dim=3) / beta - mu


def attention(q: Tensor, k: Tensor, v: Tensor, keys_valid: Tensor | None) -> Tensor:
    """Causal softmax attention of the last positions over all keys that are valid."""
    tq, tk = q.shape[2], k.shape[2]
    if keys_valid is None and tq == tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    allowed = None if keys_valid is None and tq == 1 else _allowed(tk - tq, tq, tk, keys_valid, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def _allowed(first: int, rows: int, tk: int, keys_valid: Tensor | None, device: torch.device) -> Tensor:
    """[b or 1, 1, rows, tk] bool: what the queries from position first on may read; padding reads itself, to stay finite."""
    column = torch.arange(tk, device=device)
    row = torch.arange(first, first + rows, device=device)[:, None]
    causal = (column <= row)[None, None]
    return causal if keys_valid is None else (causal & keys_valid[:, None, None]) | (column == row)


def time_decay_scan(a: Tensor, x: Tensor, initial: Tensor | None = None) -> Tensor:
    """s_t = exp(a_t) s_{t-1} + x_t along dim 1; a, x [b, t, c], a <= 0; initial [b, c] is the state before the first step.

    Doubling: after n rounds each entry holds the sum over the last 2^n steps, whose decay is summed in ``a``; no exponent is positive.
    """
    if initial is not None:
        x = torch.cat((x[:, :1] + torch.exp(a[:, :1]) * initial[:, None], x[:, 1:]), dim=1)
    shift = 1
    while shift < x.shape[1]:
        x = torch.cat((x[:, :shift], x[:, shift:] + torch.exp(a[:, shift:]) * x[:, :-shift]), dim=1)
        a = torch.cat((a[:, :shift], a[:, shift:] + a[:, :-shift]), dim=1)
        shift *= 2
    return x


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE over the whole head, halves paired: x [b, h, t, d], angles [b or 1, t, d / 2]."""
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotary_angles(position_ids: Tensor, config: FemLMConfig, dtype: torch.dtype) -> Tensor:
    """position * base^(-2i/d) for i < d/2: [b or 1, t, d / 2]."""
    wide, d = torch.promote_types(dtype, torch.float32), config.qk_head_dim
    frequencies = 1.0 / (config.rope_base ** (torch.arange(0, d, 2, dtype=wide, device=position_ids.device) / d))
    return position_ids[..., None].to(wide) * frequencies


def _keys_valid(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """The mask as bool, None where nothing is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; this model needs [batch, {length}] (past and new tokens)"
        )
    valid = attention_mask.to(torch.bool)
    return None if bool(valid.all()) else valid


def _positions(keys_valid: Tensor | None, past: int, x: Tensor) -> Tensor:
    """Positions of the new tokens, counted without the padding before them: [b or 1, t]."""
    if keys_valid is None:
        return torch.arange(past, past + x.shape[1], device=x.device)[None]
    return (keys_valid.long().cumsum(dim=-1) - 1).clamp_min(0)[:, past:]
