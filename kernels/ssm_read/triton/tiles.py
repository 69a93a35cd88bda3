"""What the state-space kernels share: a tile of tokens by channels, its fading maximum, block sizes. No loops over states, no launches.

The streams' order is the state's: values, weights, exponentials. The last is kept relative to m_t, the largest log(delta_i) + beta v_i of
the past, faded with the channel's slowest rate; its decay is exp(-(rate - slowest) delta_t) exp(m_{t-1} - m_t - slowest delta_t), both at
most 1. m is a constant to the gradient: it cancels. A token that nobody reads has delta = 0; NOTHING stands for m where none was read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.aft_read.triton.tiles import NOTHING, exponents
from kernels.implementations import interpreted

STAGES = 1


class Launch:
    """Grids and block sizes for [batch, heads, tokens, width] and states."""

    def __init__(self, batch, heads, tokens, width, states, streams):
        block_t, block_c, block_n = (4, 4, 1) if interpreted() else (64, 16, 32)
        self.block_n, self.streams = min(block_n, triton.next_power_of_2(states)), streams
        block_c = min(block_c, triton.next_power_of_2(width))
        self.columns, self.chunks = triton.cdiv(width, block_c), triton.cdiv(tokens, block_t)
        self.grid = (batch * heads * self.columns, self.chunks)
        self.carry_grid = (batch * heads * self.columns, triton.cdiv(states, self.block_n))
        self.sizes = (batch, heads, tokens, width, states, self.chunks)
        self.blocks = {"BT": block_t, "BC": block_c}
        self.options = {"num_warps": 4, "num_stages": STAGES}
        self.wide_options = {"num_warps": 8, "num_stages": STAGES}  # the gradients, which hold the most numbers

    def read_options(self, backward, free_energy):
        """The read's: eight warps but for mu and F forward, which ptxas would cut down to registers that do not hold it."""
        return self.options if free_energy and not backward else self.wide_options


@triton.jit
def shifted(x, first, BT: tl.constexpr, BC: tl.constexpr):
    """Each row one token later; ``first`` takes the first row."""
    at = tl.arange(0, BT)
    moved = tl.gather(x, tl.zeros((BT, BC), tl.int32) + tl.maximum(at - 1, 0)[:, None], 0)
    return tl.where((at == 0)[:, None], first, moved)


@triton.jit
def exponent(delta, v, beta):
    """z = log(delta) + beta v where a token is read, as its rounding and what that left."""
    read = delta > 0.0
    return exponents(tl.log(tl.where(read, delta, 1.0)), v, beta, read)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def maxima(delta, v, beta, slow, start, BT: tl.constexpr, BC: tl.constexpr):
    """(m, weight, fade): m_t from m before the tile, exp(z - m), and exp(m_{t-1} - m_t - slow delta_t)."""
    z, low = exponent(delta, v, beta)
    through = slow[None, :] * tl.cumsum(delta, 0)
    highest = tl.associative_scan(tl.where(z <= NOTHING, NOTHING, z + through), 0, _greater)
    top = tl.maximum(highest, start[None, :]) - through
    weight = tl.where(z <= NOTHING, 0.0, tl.exp(z - top + low))
    return top, weight, tl.exp(shifted(top, start[None, :], BT, BC) - top - slow[None, :] * delta)


@triton.jit
def channel(x, h, width, c, inside):
    """x[h, c] of [heads, width]."""
    return tl.load(x + h * width + c, mask=inside, other=0.0)


@triton.jit
def column(x, bh, n, t, states, tokens, mask):
    """x[b, h, n, t] of the tokens t."""
    return tl.load(x + (bh * states + n) * tokens + t, mask=mask, other=0.0)
