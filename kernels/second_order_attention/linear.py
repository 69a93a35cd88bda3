"""Linear attention as a gradient step on the energy -1/2 sum_i (q.k_i)^2, in plain PyTorch, any device. No loop over tokens.

Where chunks begin depends on the length alone and a masked pair is an exact zero: no bit of an output depends on later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def energy_linear_attention(
    q: Tensor, k: Tensor, *, causal: bool = True, valid: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_t = sum_i (q_t.k_i) k_i over i <= t (causal), or over all i: minus the gradient of `energy.quadratic_energy` in q.

    Shapes: q and k [b, h, t, d], valid [b, t] bool, False at padding (those keys count as nothing), state [b, h, d, d]: the past's sum_i
    k_i k_i^T (None: none). Returns (out [b, h, t, d] in q's type, the state after the last token).
    Types: float64, float32 or bfloat16; sums and state are float32 (float64 for float64). Time and memory linear in t.
    Raises ValueError for shapes or types that do not fit. Source: Transformers as Intrinsic Optimizers, theorem 3, with W = W_Q^T W_K.
    """
    _check(q, k, valid, state)
    b, h, t, d = q.shape
    kind, compute = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(compute), k.to(compute)
    if valid is not None:
        k = k * valid[:, None, :, None]
    past = k.new_zeros(b, h, d, d) if state is None else state
    if not causal:
        after = past + k.mT @ k
        return (q @ after).to(kind), after
    size = min(CHUNK, t)
    queries, keys = (pad(x, (0, 0, 0, -t % size)).unflatten(2, (-1, size)) for x in (q, k))
    sums = torch.cat((past[:, :, None], keys.mT @ keys), dim=2).cumsum(2)
    inside = (queries @ keys.mT).tril() @ keys
    return (inside + queries @ sums[:, :, :-1]).flatten(2, 3)[:, :, :t].to(kind), sums[:, :, -1]


def _check(q: Tensor, k: Tensor, valid: Tensor | None, state: Tensor | None) -> None:
    name = "energy_linear_attention"
    if q.dim() != 4 or q.numel() == 0 or (k.shape, k.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"{name}: q is {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}; both [batch, heads, tokens, width], not empty"
        )
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"{name}: q is {q.dtype}; use float64, float32 or bfloat16")
    (b, h, t, d), compute = q.shape, torch.promote_types(q.dtype, torch.float32)
    if valid is not None and (valid.shape != (b, t) or valid.dtype != torch.bool):
        raise ValueError(f"{name}: valid is {list(valid.shape)} {valid.dtype}, expected [{b}, {t}] bool")
    if state is not None and (state.shape != (b, h, d, d) or state.dtype != compute):
        raise ValueError(f"{name}: state is {list(state.shape)} {state.dtype}, expected [{b}, {h}, {d}, {d}] {compute}")
