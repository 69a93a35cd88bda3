"""The state-space read in Triton, forward and backward, as one autograd function: the launches, in order. No equations.

Forward: the chunks' states, those carried, the read. Backward: the states again, the sums' gradients, the states' gradients, those carried
from the end, the tokens' gradients. Nothing but the inputs is kept in between.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.aft_read.triton.forward import NOTHING
from kernels.ssm_read.triton.read import _gradients_kernel, _read_kernel
from kernels.ssm_read.triton.states import Launch, _carry_back_kernel, _carry_kernel, _gradient_states_kernel, _states_kernel
from kernels.tiles import rows_of, strides_of


def fused_past(delta, rate, b_in, c_out, v, beta, lam, gate, valid, state):
    """(o, state) as `ssm_read` says, normalised; rate, beta and state float32, delta, b_in, c_out too."""
    if valid is not None:
        delta, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (delta, v))
    delta, v, lam, gate = (None if x is None else rows_of(x) for x in (delta, v, lam, gate))
    # States after channels, tokens after states: what a program reads lies together.
    by_channel, by_token = rate.transpose(1, 2).contiguous(), [x.transpose(2, 3).contiguous() for x in (b_in, c_out)]
    beta = None if beta is None else beta.contiguous()
    return _Read.apply(delta, by_channel, *by_token, v, beta, lam, gate, state)


class _Read(torch.autograd.Function):
    """rate [h, n, d], b_in and c_out [b, h, n, t]; the others as `ssm_read` has them."""

    @staticmethod
    def forward(ctx, delta, rate, b_in, c_out, v, beta, lam, gate, state):
        call = _Call(delta, rate, b_in, c_out, v, beta, lam, gate, state)
        states, after = call.states()
        o = call.time_first(v.dtype)
        call.read(states, o, None, None, None, None, None)
        ctx.save_for_backward(delta, rate, b_in, c_out, v, beta, lam, gate, state)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _):
        call = _Call(*ctx.saved_tensors)
        return *call.gradients(rows_of(d_o)), None


class _Call:
    """A call's tensors and sizes, and its launches."""

    def __init__(self, delta, rate, b_in, c_out, v, beta, lam, gate, state):
        self.delta, self.rate, self.b_in, self.c_out, self.v = delta, rate, b_in, c_out, v
        self.beta, self.lam, self.gate, self.state = beta, lam, gate, state
        self.shape, self.number = v.shape, rate.shape[1]
        self.streams = 2 if beta is None else 3
        self.launch = Launch(*v.shape, self.number, self.streams)
        self.rows, self.width = v.shape[0] * v.shape[1], v.shape[3]
        self.slow = rate.amin(1)
        self.tokens = strides_of(delta, v)
        self.starts = None

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.v.device)

    def time_first(self, dtype):
        """[b, h, t, d] that lies in memory as [t, b, h, d]."""
        batch, heads, tokens, width = self.shape
        return self.empty(tokens, batch, heads, width, dtype=dtype).permute(1, 2, 0, 3)

    def per_chunk(self, *more):
        return self.empty(self.rows, self.launch.chunks, *more, self.width)

    def states(self):
        """The states before each chunk [b h, chunks, streams, n, d], and the one behind the last token; m before each in ``starts``."""
        launch, beta = self.launch, self.beta
        made, spans = self.per_chunk(self.streams, self.number), self.per_chunk()
        tops, given_top = None, None
        if beta is not None:
            tops, self.starts = self.per_chunk(), self.empty(self.rows, launch.chunks + 1, self.width)
            if self.state is not None:
                sums = self.state[..., 2 * self.number : -1]
                given_top = self.state[..., -1].masked_fill((sums == 0).all(-1), NOTHING.value).contiguous()
        _states_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.rate, self.slow, beta, made, tops, spans,
            *self.tokens, *launch.sizes, **launch.blocks, **launch.options,
        )  # fmt: skip
        columns = self.streams * self.number + (beta is not None)
        after = self.empty(*self.shape[:2], self.width, columns)
        _carry_kernel[launch.carry_grid](
            made, tops, spans, self.rate, self.slow, self.state, given_top, self.starts, after, *self.carried(),
            BETA=beta is not None, BC=launch.blocks["BC"], BN=launch.block_n, **launch.options,
        )  # fmt: skip
        self.spans = spans
        return made, after

    def carried(self):
        return self.shape[1], self.width, self.number, self.launch.chunks

    def read(self, states, o, d_o, d_lam, d_gate, d_sums, d_beta):
        launch = self.launch
        _read_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, self.beta, self.lam, self.gate, states, self.starts,
            o, d_o, d_lam, d_gate, d_sums, d_beta, *self.tokens, *strides_of(self.lam, self.gate, d_o), *launch.sizes,
            **launch.blocks, **launch.read_options(o is None, self.beta is not None),
        )  # fmt: skip

    def gradients(self, d_o):
        """Those of delta, rate, b_in, c_out, v, beta, lam, gate."""
        launch, beta = self.launch, self.beta
        batch, heads, tokens, width = self.shape
        states, _ = self.states()
        d_lam, d_gate = (None if x is None else self.time_first(x.dtype) for x in (self.lam, self.gate))
        d_sums = self.empty(2 if beta is None else 4, self.rows, tokens, width)
        of_free, of_values = (None if beta is None else self.per_chunk() for _ in range(2))
        self.read(states, None, d_o, d_lam, d_gate, d_sums, of_free)
        gradients = torch.empty_like(states)
        _gradient_states_kernel[launch.grid](
            self.delta, self.c_out, self.rate, self.slow, beta, self.starts, d_sums, gradients,
            *self.tokens[:3], *launch.sizes, **launch.blocks, **launch.options,
        )  # fmt: skip
        _carry_back_kernel[launch.carry_grid](
            gradients, self.spans, self.rate, self.slow, self.starts, *self.carried(),
            BETA=beta is not None, BC=launch.blocks["BC"], BN=launch.block_n, **launch.options,
        )  # fmt: skip
        d_delta, dv = self.time_first(self.delta.dtype), self.time_first(self.v.dtype)
        d_b_in, d_c_out = (self.empty(launch.columns, batch, heads, self.number, tokens) for _ in range(2))
        d_rate = self.per_chunk(self.number)
        _gradients_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, beta, states, gradients, self.starts, d_sums,
            d_delta, dv, d_b_in, d_c_out, d_rate, of_values, *self.tokens, *launch.sizes, **launch.blocks, **launch.wide_options,
        )  # fmt: skip
        d_rate = d_rate.view(batch, heads, launch.chunks, self.number, width).sum((0, 2))
        d_beta = None if beta is None else (of_free + of_values).view(batch, heads, launch.chunks, width).sum((0, 2))
        return d_delta, d_rate, d_b_in.sum(0), d_c_out.sum(0), dv, d_beta, d_lam, d_gate
