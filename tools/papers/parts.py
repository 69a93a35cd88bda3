"""Layers that only experiments of the papers use: a block's mixer or MLP is replaced by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from fem_megatron.config import ModelConfig
from fem_megatron.state import Context
from kernels.symmetric_attention.reference import effective_rank, mean_angle
from tools.papers.network import sinusoids


class SharedAttention(nn.Module):
    """Attention with one matrix for queries, keys and values (Hyper-SET, appendix F.3).

        x + sign * O concat_h softmax(u_h u_h^T / sqrt(p)) u_h,   u_h = W_h RMSNorm(x)

    tied: 0: O is a separate matrix. 1 or -1: O = W^T, and this is the sign. The paper reverses the
    sign and does not define O. A separate O absorbs the sign, and its initial distribution is
    symmetric, so that only a tied O can show an effect. Tokens [s, b, D], without positions.
    """

    def __init__(self, model: ModelConfig, tied: int = 0) -> None:
        super().__init__()
        width = model.hidden_size
        self.heads, self.tied, self.causal = model.num_attention_heads, tied, model.causal
        self.norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.shared = nn.Linear(width, width, bias=False)
        self.out = None if tied else nn.Linear(width, width, bias=False)

    def project(self, x: Tensor) -> Tensor:
        """Map x [s, b, D] to u [b, heads, s, p]."""
        return self.shared(self.norm(x)).unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return x after the step, [s, b, D]."""
        u = self.project(x)
        read = scaled_dot_product_attention(u, u, u, is_causal=self.causal)
        read = read.permute(2, 0, 1, 3).flatten(2)
        if self.out is not None:
            made: Tensor = self.out(read)
            return x + made
        return x + self.tied * linear(read, self.shared.weight.T)

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """Return effective rank and mean angle (radians) of u, [b, heads] each."""
        sample = self.project(x[tokens]).float()
        return {"effective_rank": effective_rank(sample), "mean_angle": mean_angle(sample)}


class ReluMlp(nn.Module):
    """MLP x + down(relu(up(RMSNorm(x)))) with biases; its inner width is the model's."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.ffn_hidden_size
        if inner is None:
            raise ValueError("ReluMlp needs model.ffn_hidden_size")
        self.norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return x after the MLP, [s, b, D]."""
        made: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + made


class Hyena(nn.Module):
    """Hyena operator of order 2 (Poli et al. 2023, arXiv 2302.10866), as the MAD benchmark uses it.

        p = W RMSNorm(x);  v, x_1, x_2 = short(p)  (causal convolutions of 3 tokens);
        v <- x_1 v;  v <- x_2 (h * v + d v);  x + O v

    h is a long causal convolution per channel. Its filter h_t = MLP(positions(t)) exp(-a t) is a
    network of sines on sinusoids of the position; the decay rates a of the channels are spaced
    geometrically, so that a filter falls to 1 % after 0.3 to 1.5 of the length. length: of the
    sequences.
    """

    positions: Tensor
    decay: Tensor

    def __init__(
        self, model: ModelConfig, length: int, features: int = 16, filter_width: int = 64
    ) -> None:
        super().__init__()
        width = model.hidden_size
        self.norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.into = nn.Linear(width, 3 * width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, groups=3 * width, padding=2)
        self.first = nn.Linear(features, filter_width)
        self.second = nn.Linear(filter_width, filter_width)
        self.last = nn.Linear(filter_width, width, bias=False)
        self.skip = nn.Parameter(torch.empty(1, width))
        self.out = nn.Linear(width, width)
        place = torch.linspace(0.0, 1.0, length)[:, None]
        rates = math.log(100.0) / torch.logspace(math.log10(0.3), math.log10(1.5), width)
        self.register_buffer("positions", sinusoids(length, features), persistent=False)
        self.register_buffer("decay", torch.exp(-place * rates), persistent=False)

    def filters(self, length: int) -> Tensor:
        """Return h, [length, D]."""
        hidden = self.second(self.first(self.positions[:length]).sin()).sin()
        made: Tensor = self.last(hidden) * self.decay[:length]
        return made

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return x after the mixer, [s, b, D]."""
        length = len(x)
        mixed = self.short(self.into(self.norm(x)).permute(1, 2, 0))[..., :length]
        gate, first, value = mixed.chunk(3, dim=1)
        value = first * value
        wide = torch.promote_types(value.dtype, torch.float32)
        transformed = torch.fft.rfft(value.to(wide), n=2 * length)
        kernel = torch.fft.rfft(self.filters(length).T.to(wide), n=2 * length)
        long = torch.fft.irfft(transformed * kernel, n=2 * length)[..., :length].to(value)
        value = gate * (long + self.skip.T * value)
        made: Tensor = self.out(value.permute(2, 0, 1))
        return x + made
