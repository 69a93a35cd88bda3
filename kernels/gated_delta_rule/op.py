"""Gated delta rule. One public function: `gated_delta_rule`. Projections, convolutions, norms and
gates belong to the layer.

The definition runs in plain PyTorch on any device: the tokens of a chunk are solved at once (WY
form), and states pass from chunk to chunk. Within a chunk, with Gamma_ij = exp(g_(j+1) + ... + g_i)
for j <= i (else 0) and gamma_i = exp(g_1 + ... + g_i):

    (I + strict_lower(diag(beta) K K^T * Gamma)) [U | W] = diag(beta) [V | gamma K]
    N = U - W S;   O = gamma Q S + (Q K^T * Gamma) N;   S <- gamma_C S + (Gamma_C: K)^T N

Only sums of g over windows, <= 0, are exponentiated, so a decay of any strength is exact. No output
depends on a later token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, lacks_fla
from kernels.registered import registered

OP = Op(
    "gated_delta_rule",
    "DeltaNet's and Gated DeltaNet's recurrence, in chunks, with a state",
    (
        Implementation("fla", "flash-linear-attention's chunked kernels", lacks_fla),
        Implementation("reference", "plain PyTorch, chunk by chunk"),
    ),
)


def _shapes(q: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(
        *q.shape[:2], q.shape[3], v.shape[3], dtype=wide
    )


@operation("q", state=True)
@registered(_shapes)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    scale: float | None = None,
    chunk: int = 64,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, o_t = scale S_t^T
    q_t; return (o, the last S).

    Shapes: q and k [b, h, t, dk], v [b, h, t, dv], beta and log_decay g [b, h, t], initial [b, h,
    dk, dv] (None: zero); o [b, h, t, dv], S [b, h, dk, dv]. log_decay None: no decay, the plain
    delta rule. scale None: 1 / sqrt(dk). The caller must ensure g <= 0 (-inf, a full reset, is
    allowed) and, for a stable memory, |k| <= 1 and beta in [0, 2]. These are not checked. Types: q,
    k, v all float64, float32, bfloat16 or float16; the others the same or float32 (the state is
    float32, float64 for float64). o has q's type; intermediate values are float32 or wider in the
    reference. implementation: "reference" is plain PyTorch in chunks of ``chunk`` tokens. "fla" is
    flash-linear-attention's chunked kernel, for bfloat16 on a GPU; its products are in bfloat16.
    "auto" uses fla if it is installed and supports the call and the call has more than one token,
    and the reference otherwise. The choice is logged once. Raises ValueError for shapes, types or
    names that do not fit. Equations: arXiv 2412.06464, section 3; 2406.06484 without decay.
    """
    _check(q, k, v, beta, log_decay, initial, chunk)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    unfit = (
        None
        if q.dtype == torch.bfloat16
        else f"it needs bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    )
    if unfit is None and implementation == "auto" and q.shape[2] == 1:
        unfit = "one token"
    if OP.choose(implementation, q.device, {"fla": unfit}.get) == "fla":
        return _by_fla(q, k, v, beta, log_decay, initial, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    g = torch.zeros_like(beta, dtype=wide) if log_decay is None else log_decay.to(wide)
    first = (
        q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=wide)
        if initial is None
        else initial.to(wide)
    )
    o, state = chunked_delta_rule(
        q.to(wide) * scale, k.to(wide), v.to(wide), beta.to(wide), g, first, chunk
    )
    return o.to(q.dtype), state


def _by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the same with flash-linear-attention, whose layout is [b, t, h, d] and which has
    separate kernels with and without decay.
    """
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    known = {
        "beta": beta.transpose(1, 2).contiguous(),
        "scale": scale,
        "initial_state": initial,
        "output_final_state": True,
    }
    if log_decay is None:
        from fla.ops.delta_rule import chunk_delta_rule

        o, state = chunk_delta_rule(*given, **known)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        o, state = chunk_gated_delta_rule(
            *given, g=log_decay.float().transpose(1, 2).contiguous(), **known
        )
    return o.transpose(1, 2), state


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    chunk: int,
) -> None:
    if chunk < 1:
        raise ValueError(f"gated_delta_rule: chunk is {chunk}; it counts tokens, at least 1")
    check_first("gated_delta_rule", "q", q)
    check_first("gated_delta_rule", "v", v)
    (b, h, t, dk), dv = q.shape, v.shape[3]
    types = (q.dtype,) if q.dtype == torch.float64 else (q.dtype, torch.float32)
    expected: dict[str, Any] = {
        "k": (k, q.shape, q.dtype),
        "v": (v, (b, h, t, dv), q.dtype),
        "beta": (beta, (b, h, t), *types),
    }
    expected |= {
        "log_decay": (log_decay, (b, h, t), *types),
        "initial": (initial, (b, h, dk, dv), *types),
    }
    check_others("gated_delta_rule", "q", q, expected)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, h, t, dv] and the last state [b, h, dk, dv].

    All arguments have one type; q is already scaled, g is the log-decay, and ``state`` is the
    initial state.
    """
    length, chunk = q.shape[2], min(chunk, q.shape[2])
    missing = -length % chunk
    q, k, v = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, g = (pad(x, (0, missing)).unflatten(2, (-1, chunk)) for x in (beta, g))
    decay, from_start = window_decays(g), g.cumsum(-1).exp()[..., None]

    weighted = beta[..., None] * k
    system = (weighted @ k.mT * decay).tril(-1)
    fresh, erased = _solve(
        system, torch.cat((beta[..., None] * v, from_start * weighted), dim=-1)
    ).split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT * decay).tril()
    reads, writes = from_start * q, (decay[..., -1, :, None] * k).mT
    total = from_start[..., -1:, :]

    outputs = []
    for n in range(q.shape[2]):
        new = fresh[:, :, n] - erased[:, :, n] @ state
        outputs.append(reads[:, :, n] @ state + scores[:, :, n] @ new)
        state = total[:, :, n] * state + writes[:, :, n] @ new
    return torch.cat(outputs, dim=2)[:, :, :length], state


def window_decays(g: Tensor) -> Tensor:
    """Return exp(g_(j+1) + ... + g_i) for j <= i, and 1 above the diagonal: g [..., c] -> [..., c,
    c].

    Every window is summed separately: a difference of two long sums would lose a small decay's
    digits after a large one.
    """
    size = g.shape[-1]
    outside = torch.ones(size, size, dtype=torch.bool, device=g.device).triu()
    return g[..., None].expand(*g.shape, size).masked_fill(outside, 0.0).cumsum(-2).exp()


def _solve(system: Tensor, right: Tensor) -> Tensor:
    if system.shape[-1] == 1:
        return right
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
