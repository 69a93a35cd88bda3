"""The free energy from attention's reads, in registers: F - mu for the forward kernel, and the kernel of its gradients.

The equations and guards are those of `kernels.free_energy.streams`; only log1p(y) - y is taken without its cancellation near zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fem_attention.triton import load_tile
from kernels.free_energy.streams import LOWEST_Y
from kernels.implementations import interpreted
from kernels.tiles import build, empty_as, padded, rows_of, store_tile, strides_of

LOWEST = tl.constexpr(LOWEST_Y)
WARPS = 4


@triton.jit
def free_energy_gap(mu, z, beta, centre, shifted):
    """(F - mu >= 0, mu - c, y) from float32 reads mu and Z, beta, c and kappa = 1 where shifted; y has meaning only there."""
    offset = mu - centre
    y = tl.maximum(offset * beta + z, LOWEST)
    # log1p(y) = 2 artanh(t) with t = y / (2 + y), and 2 t - y = -t y: no digit is lost where y is small.
    t = y / (2.0 + y)
    s = t * t
    series = 1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15 + s * (1 / 17)))))))
    beyond = tl.where(tl.abs(y) < 0.5, 2.0 * t * s * series - t * y, tl.log(1.0 + y) - y)
    gap = tl.where(shifted, (beyond + z) / beta, tl.log(tl.where(shifted, 1.0, z)) / beta - offset)
    return tl.maximum(gap, 0.0), offset, y


@triton.jit
def load_channels(beta, centre, shifted, channel, DV: tl.constexpr):
    """beta, c and kappa = 1 of a head's channels from ``channel`` [1, n] of the DV that begin at the given addresses."""
    there = channel < DV
    return (
        tl.load(beta + channel, mask=there, other=1.0).to(tl.float32),
        tl.load(centre + channel, mask=there, other=0.0),
        tl.load(shifted + channel, mask=there, other=1).to(tl.int1),
    )


@triton.jit
def _epilogue_kernel(
    d_out, reads, beta, centre, shifted, lam, gate, d_reads, row_term, d_lam, d_gate, d_beta,
    heads, kv_heads, tq,
    d_out_b, d_out_h, d_out_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t,
    d_lam_b, d_lam_h, d_lam_t, d_gate_b, d_gate_h, d_gate_t,
    DV: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head: do -> [dmu | dZ], the softmax's row term, dlam, dgate, and the block's part of dbeta.

    Long, because every tensor has its strides.
    """
    blocks = tl.cdiv(tq, ROWS)
    block = tl.program_id(0) % blocks
    head_of_all = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head_of_all // heads, head_of_all % heads
    kv = h // (heads // kv_heads)
    start = (block * ROWS).to(tl.int64)
    left = tq - block * ROWS
    row = tl.arange(0, ROWS)
    there = (row[:, None] < left) & (tl.arange(0, BDV)[None, :] < DV)

    at = (b * kv_heads + kv) * DV
    slope, middle, near = load_channels(beta + kv * DV, centre + at, shifted + at, tl.arange(0, BDV)[None, :], DV)
    d_o = load_tile(d_out + b * d_out_b + h * d_out_h + start * d_out_t, d_out_t, left, ROWS, DV, BDV, True).to(tl.float32)
    both = (head_of_all * tq + start) * 2 * DV
    mu = load_tile(reads + both, 2 * DV, left, ROWS, DV, BDV, True)
    z = tl.where(there, load_tile(reads + both + DV, 2 * DV, left, ROWS, DV, BDV, True), 1.0)
    gap, offset, y = free_energy_gap(mu, z, slope, middle, near)
    mixed = gap
    if lam is not None:
        mix = load_tile(lam + b * lam_b + h * lam_h + start * lam_t, lam_t, left, ROWS, DV, BDV, True).to(tl.float32)
        mixed = mix * gap
    if gate is not None:
        opened = load_tile(gate + b * gate_b + h * gate_h + start * gate_t, gate_t, left, ROWS, DV, BDV, True).to(tl.float32)
        store_tile(d_gate + b * d_gate_b + h * d_gate_h + start * d_gate_t, d_gate_t, left, d_o * (mu + mixed), ROWS, DV, BDV)
        d_o *= opened
    d_gap = d_o
    if lam is not None:
        store_tile(d_lam + b * d_lam_b + h * d_lam_h + start * d_lam_t, d_lam_t, left, d_o * gap, ROWS, DV, BDV)
        d_gap = d_o * mix
    tilted = d_gap * tl.where(near, y / (1.0 + y), 1.0)
    d_mu = (d_o - tilted).to(d_reads.dtype.element_ty)
    d_z = (d_gap / (tl.where(near, 1.0 + y, z) * slope)).to(d_reads.dtype.element_ty)
    store_tile(d_reads + both, 2 * DV, left, d_mu, ROWS, DV, BDV)
    store_tile(d_reads + both + DV, 2 * DV, left, d_z, ROWS, DV, BDV)
    # Of the rounded gradients, as the attention's backward multiplies them: the rows of its dS add up to zero then.
    term = tl.sum(tl.where(there, d_mu.to(tl.float32) * mu + d_z.to(tl.float32) * z, 0.0), 1)
    tl.store(row_term + head_of_all * tq + start + row, term, mask=row < left)
    part = tl.sum(tl.where(there, -(tilted * offset + d_gap * gap) / slope, 0.0), 0)
    channel = tl.arange(0, BDV)
    tl.store(d_beta + (head_of_all * blocks + block) * DV + channel, part, mask=channel < DV)


@triton.jit
def _row_term_kernel(d_out, out, row_term, heads, tq, d_out_b, d_out_h, d_out_t, out_b, out_h, out_t,
                     N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Without an epilogue: the softmax's row term, the sum of do o over a row."""
    blocks = tl.cdiv(tq, ROWS)
    block = tl.program_id(0) % blocks
    head_of_all = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head_of_all // heads, head_of_all % heads
    start = (block * ROWS).to(tl.int64)
    left = tq - block * ROWS
    d_o = load_tile(d_out + b * d_out_b + h * d_out_h + start * d_out_t, d_out_t, left, ROWS, N, BN, True).to(tl.float32)
    o = load_tile(out + b * out_b + h * out_h + start * out_t, out_t, left, ROWS, N, BN, True).to(tl.float32)
    row = tl.arange(0, ROWS)
    tl.store(row_term + head_of_all * tq + start + row, tl.sum(d_o * o, 1), mask=row < left)


def epilogue_gradients(d_out, reads, beta, centre, shifted, lam, gate):
    """([dmu | dZ] contiguous in do's type, row term [b, h, tq], dlam, dgate, dbeta) of o's gradient do [b, h, tq, dv].

    reads [b, h, tq, 2 dv]: mu and Z in float32; the others as in `attend_read`. dbeta is the epilogue's own part, at fixed values.
    """
    d_out = rows_of(d_out)
    b, h, tq, dv = d_out.shape
    hk = beta.shape[0]
    rows = _rows(dv)
    blocks = triton.cdiv(tq, rows)
    d_reads = torch.empty(b, h, tq, 2 * dv, dtype=d_out.dtype, device=d_out.device)
    row_term = torch.empty(b, h, tq, dtype=torch.float32, device=d_out.device)
    d_beta = torch.empty(b, hk, h // hk, blocks, dv, dtype=torch.float32, device=d_out.device)
    d_lam, d_gate = (None if t is None else empty_as(t, width=dv) for t in (lam, gate))
    strides = strides_of(d_out, lam, gate, d_lam, d_gate)
    _epilogue_kernel[(b * h * blocks,)](
        d_out, reads, beta, centre, shifted, lam, gate, d_reads, row_term, d_lam, d_gate, d_beta, h, hk, tq, *strides,
        DV=dv, BDV=padded(dv), ROWS=rows, num_warps=WARPS,
    )  # fmt: skip
    return d_reads, row_term, d_lam, d_gate, d_beta.sum((0, 2, 3)).to(beta.dtype)


def row_term(d_out, out):
    """The sum of do o over each row [b, h, tq], float32, of do and o [b, h, tq, n], rows contiguous."""
    b, h, tq, n = out.shape
    rows = _rows(n)
    term = torch.empty(b, h, tq, dtype=torch.float32, device=out.device)
    _row_term_kernel[(b * h * triton.cdiv(tq, rows),)](
        d_out, out, term, h, tq, *d_out.stride()[:3], *out.stride()[:3], N=n, BN=padded(n), ROWS=rows, num_warps=WARPS
    )
    return term


def _rows(width):
    """Rows at once: a tile gives each thread eight elements, or what it keeps of them would not fit the registers."""
    return 16 if interpreted() else max(4, 1024 // padded(width))


def _build(label, kernel, constants):
    return build(
        label, kernel, constants, WARPS, 3, even="tq",
        bf16="d_out out lam gate d_reads d_lam d_gate", fp32="reads beta centre row_term d_beta",
    )  # fmt: skip


def _builds():
    for dv, gated in ((32, True), (64, True), (48, True), (128, True), (64, False)):
        absent = {} if gated else dict.fromkeys(("lam", "d_lam", "gate", "d_gate"))
        label = f"gradients of the free energy, d_v {dv}" + ("" if gated else ", no lam, no gate")
        yield _build(label, _epilogue_kernel, absent | {"DV": dv, "BDV": padded(dv), "ROWS": _rows(dv)})
    yield _build("row term, 128 channels", _row_term_kernel, {"N": 128, "BN": 128, "ROWS": _rows(128)})


BUILDS = tuple(_builds())
