"""State-space read in Triton as one autograd function, forward and backward, and the read itself.

One program processes a chunk and a block of channels, one state after the other, with scans over
the chunk. Forward, it writes o. Backward, it recomputes the same sums and writes the gradients of
lam, gate and the sums: of C S for values, weights, exponentials and u, including m (d_sums [5, b h,
t, d]; 2 without the free energy), which `gradients` reads.

The launches: forward the chunks' states, the carry, the read. Backward the states again, the sums'
gradients, the states' gradients, the carry from the end, the tokens' gradients. Only the inputs are
stored in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.aft_read.op import first_value
from kernels.aft_read.triton.forward import (
    NOTHING,
    counted,
    dense,
    exponents_from,
    free_energy,
    join_one,
    join_three,
    join_two,
    load,
    place,
)
from kernels.aft_read.triton.function import sources
from kernels.fem_attention.triton.prep import excess
from kernels.ssm_read.triton.gradients import _gradients_kernel
from kernels.ssm_read.triton.states import (
    Launch,
    _carry_back_kernel,
    _carry_kernel,
    _gradient_states_kernel,
    _states_kernel,
    channel,
    column,
    maxima,
)
from kernels.tiles import rows_of, strides_of


def fused_past(delta, rate, b_in, c_out, v, beta, lam, gate, valid, state):
    """Return (o, state) as `ssm_read` does, normalised. rate, beta, state, delta, b_in and c_out
    are float32.
    """
    centre, number = None, rate.shape[2]
    if beta is not None:
        centre = first_value(v, None if valid is None else valid[:, None, :, None])[:, :, 0].float()
        if state is not None:
            centre = torch.where(
                (state[..., number : 2 * number] == 0).all(-1), centre, state[..., -2]
            )
    if valid is not None:
        delta, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (delta, v))
    delta, v, lam, gate = (None if x is None else rows_of(x) for x in (delta, v, lam, gate))
    # Channels before states, states before tokens: a program reads contiguous memory.
    by_channel, by_token = (
        rate.transpose(1, 2).contiguous(),
        [x.transpose(2, 3).contiguous() for x in (b_in, c_out)],
    )
    beta, centre = (None if x is None else x.contiguous() for x in (beta, centre))
    return _Read.apply(delta, by_channel, *by_token, v, beta, centre, lam, gate, state)


class _Read(torch.autograd.Function):
    """Autograd function. rate [h, n, d], b_in and c_out [b, h, n, t], centre [b, h, d]; the others
    are those of `ssm_read`.
    """

    @staticmethod
    def forward(ctx, delta, rate, b_in, c_out, v, beta, centre, lam, gate, state):
        call = _Call(delta, rate, b_in, c_out, v, beta, centre, lam, gate, state)
        states, after = call.states()
        o = call.time_first(v.dtype)
        call.read(states, o, None, None, None, None, None)
        ctx.save_for_backward(delta, rate, b_in, c_out, v, beta, centre, lam, gate, state)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _):
        call = _Call(*ctx.saved_tensors)
        *first, d_lam, d_gate = call.gradients(rows_of(d_o))
        return *first, None, d_lam, d_gate, None


class _Call:
    """A call's tensors and sizes, and its launches."""

    def __init__(self, delta, rate, b_in, c_out, v, beta, centre, lam, gate, state):
        self.delta, self.rate, self.b_in, self.c_out, self.v = delta, rate, b_in, c_out, v
        self.beta, self.centre, self.lam, self.gate, self.state = beta, centre, lam, gate, state
        self.shape, self.number = v.shape, rate.shape[1]
        self.streams = 2 if beta is None else 4
        self.launch = Launch(*v.shape, self.number, self.streams)
        self.rows, self.width = v.shape[0] * v.shape[1], v.shape[3]
        self.slow = rate.amin(1)
        self.tokens = strides_of(delta, v)
        self.starts = self.left = None

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.v.device)

    def time_first(self, dtype):
        """Return an empty tensor [b, h, t, d] with the memory layout [t, b, h, d]."""
        batch, heads, tokens, width = self.shape
        return self.empty(tokens, batch, heads, width, dtype=dtype).permute(1, 2, 0, 3)

    def per_chunk(self, *more):
        return self.empty(self.rows, self.launch.chunks, *more, self.width)

    def states(self):
        """Return the states before each chunk [b h, chunks, streams, n, d], and the one after the
        last token.

        Also sets ``starts``, m before each chunk, and ``left``, positive where a value was too far
        from c.
        """
        launch, beta = self.launch, self.beta
        made, spans = self.per_chunk(self.streams, self.number), self.per_chunk()
        tops, lost, given_top = None, None, None
        if beta is not None:
            tops, lost = self.per_chunk(), self.per_chunk()
            self.starts, self.left = (
                self.empty(self.rows, launch.chunks + 1, self.width) for _ in range(2)
            )
            if self.state is not None:
                sums = self.state[..., 2 * self.number : 3 * self.number]
                given_top = (
                    self.state[..., -1].masked_fill((sums == 0).all(-1), NOTHING.value).contiguous()
                )
        _states_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.rate, self.slow, beta, self.centre, made, tops,
            lost, spans,
            *self.tokens, *launch.sizes, **launch.blocks, **launch.options,
        )  # fmt: skip
        columns = self.streams * self.number + 2 * (beta is not None)
        after = self.empty(*self.shape[:2], self.width, columns)
        _carry_kernel[launch.carry_grid](
            made, tops, lost, spans, self.rate, self.slow, self.state, given_top, self.centre,
            self.starts, self.left, after,
            *self.carried(),
            BETA=beta is not None, BC=launch.blocks["BC"], BN=launch.block_n, **launch.options,
        )  # fmt: skip
        self.spans = spans
        return made, after

    def carried(self):
        return self.shape[1], self.width, self.number, self.launch.chunks

    def read(self, states, o, d_o, d_lam, d_gate, d_sums, d_beta):
        launch = self.launch
        _read_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, self.beta, self.centre,
            self.lam, self.gate, states,
            self.starts, self.left, o, d_o, d_lam, d_gate, d_sums, d_beta, *self.tokens,
            *strides_of(self.lam, self.gate, d_o),
            *launch.sizes, **launch.blocks, **launch.wide_options,
        )  # fmt: skip

    def gradients(self, d_o):
        """Return the gradients of delta, rate, b_in, c_out, v, beta, lam and gate."""
        launch, beta = self.launch, self.beta
        batch, heads, tokens, width = self.shape
        states, _ = self.states()
        d_lam, d_gate = (
            None if x is None else self.time_first(x.dtype) for x in (self.lam, self.gate)
        )
        d_sums = self.empty(2 if beta is None else 5, self.rows, tokens, width)
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
        d_b_in, d_c_out = (
            self.empty(launch.gradient_columns, batch, heads, self.number, tokens) for _ in range(2)
        )
        d_rate = self.per_chunk(self.number)
        _gradients_kernel[launch.gradient_grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, beta, self.centre,
            states, gradients, self.starts, d_sums,
            d_delta, dv, d_b_in, d_c_out, d_rate, of_values, *self.tokens, *launch.sizes,
            **launch.gradient_blocks, **launch.wide_options,
        )  # fmt: skip
        d_rate = d_rate.view(batch, heads, launch.chunks, self.number, width).sum((0, 2))
        d_beta = (
            None
            if beta is None
            else (of_free + of_values).view(batch, heads, launch.chunks, width).sum((0, 2))
        )
        return d_delta, d_rate, d_b_in.sum(0), d_c_out.sum(0), dv, d_beta, d_lam, d_gate


@triton.jit
def _read_kernel(
    delta, v, b_in, c_out, rate, slow, beta, centre, lam, gate, states_of, starts, left, o, d_o,
    d_lam, d_gate, d_sums, d_beta,
    db, dh, dt, vb, vh, vt, lb, lh, lt, gb, gh, gt, ob, oh, ot, batch, heads, tokens, width, states,
    chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write o, or the gradients of lam, gate and the sums.

    Long, because forward and backward end differently after the same sums.
    """
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    STREAMS: tl.constexpr = 4 if BETA else 2
    t = chunk * BT + tl.arange(0, BT)
    mask = (t < tokens)[:, None] & inside[None, :]
    step, value = load(delta, b, h, t, c, db, dh, dt, mask), load(v, b, h, t, c, vb, vh, vt, mask)
    slowest = channel(slow, h, width, c, inside)
    slow_decay = tl.exp(-slowest[None, :] * step)
    top, weight, fade, u, far = step, step, step, step, mask
    inverse_temperature, middle, centred = slowest, tl.zeros((BC,), tl.float32), value
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
        middle = tl.load(centre + bh * width + c, mask=inside, other=0.0)
        before_chunk = (bh * (chunks + 1) + chunk) * width + c
        start = tl.load(starts + before_chunk, mask=inside, other=0.0)
        top, weight, fade = maxima(step, value, inverse_temperature, slowest, start, BT, BC)
        centred, x, far = exponents_from(value, inverse_temperature, middle, step > 0.0)
        far = (tl.cumsum(far.to(tl.int32), 0) > 0) | (
            tl.load(left + before_chunk, mask=inside, other=0.0) > 0.0
        )[None, :]
        u = excess(x)
    values, total, joint = (
        tl.zeros((BT, BC), tl.float32),
        tl.zeros((BT, BC), tl.float32),
        tl.zeros((BT, BC), tl.float32),
    )
    beyond = joint
    for n in range(states):
        relative = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0) - slowest
        decay = tl.exp(-relative[None, :] * step)
        taken = column(b_in, bh, n, t, states, tokens, t < tokens)[:, None]
        given = column(c_out, bh, n, t, states, tokens, t < tokens)[:, None]
        before = states_of + (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        intake = step * taken
        if BETA:
            through, s_weights, s_values, s_beyond = tl.associative_scan(
                (decay * slow_decay, intake, intake * centred, intake * u), 0, join_three
            )
            beyond += given * (
                s_beyond
                + through * tl.load(before + 3 * states * width, mask=inside, other=0.0)[None, :]
            )
        else:
            through, s_weights, s_values = tl.associative_scan(
                (decay * slow_decay, intake, intake * centred), 0, join_two
            )
        values += given * (s_values + through * tl.load(before, mask=inside, other=0.0)[None, :])
        total += given * (
            s_weights + through * tl.load(before + states * width, mask=inside, other=0.0)[None, :]
        )
        if BETA:
            through, s_joint = tl.associative_scan((decay * fade, weight * taken), 0, join_one)
            joint += given * (
                s_joint
                + through * tl.load(before + 2 * states * width, mask=inside, other=0.0)[None, :]
            )
    offset = values / counted(total)
    mu = offset + middle[None, :]
    made, mixed, gap, y = mu, mu, mu, mu
    if BETA:
        own_top = tl.where(joint == 0.0, 0.0, top)
        gap, y = free_energy(
            offset,
            tl.zeros_like(mu),
            total,
            own_top,
            joint,
            beyond,
            far,
            inverse_temperature,
            middle,
        )
        made = mu + gap
    if lam is not None:
        mixed = load(lam, b, h, t, c, lb, lh, lt, mask)
        made = mu + mixed * gap
    at = dense(b, h, t, c, batch, heads, width)
    if o is not None:
        if gate is not None:
            made *= load(gate, b, h, t, c, gb, gh, gt, mask)
        tl.store(o + at, made.to(o.dtype.element_ty), mask=mask)
    else:
        g = load(d_o, b, h, t, c, ob, oh, ot, mask)
        if gate is not None:
            tl.store(d_gate + at, (g * made).to(d_gate.dtype.element_ty), mask=mask)
            g *= load(gate, b, h, t, c, gb, gh, gt, mask)
        if lam is not None:
            tl.store(d_lam + at, (g * gap).to(d_lam.dtype.element_ty), mask=mask)
        x_v, x_w, x_u, x_e, d_free = sources(
            g,
            mixed,
            1.0,
            offset,
            y,
            total,
            joint,
            beyond,
            far,
            inverse_temperature,
            BETA,
            lam is not None,
        )
        at = (bh * tokens + t)[:, None] * width + c[None, :]
        plane = batch * heads * tl.cast(tokens, tl.int64) * width
        tl.store(d_sums + at, x_v, mask=mask)
        tl.store(d_sums + plane + at, tl.where(total == 0.0, 0.0, -x_w), mask=mask)
        if BETA:
            tl.store(
                d_sums + 2 * plane + at,
                tl.where(joint == 0.0, 0.0, x_e / inverse_temperature[None, :]),
                mask=mask,
            )
            tl.store(d_sums + 3 * plane + at, top, mask=mask)
            tl.store(d_sums + 4 * plane + at, x_u, mask=mask)
            of_beta = d_free * (gap + tl.where(far, mu, offset * (y / (1.0 + y))))
            tl.store(
                d_beta + (bh * chunks + chunk) * width + c,
                -tl.sum(of_beta, 0) / inverse_temperature,
                mask=inside,
            )
