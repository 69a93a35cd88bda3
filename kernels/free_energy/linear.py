"""Free-energy read over linear attention with decay: one public function, `linear_read`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import operation
from kernels.free_energy.op import free_energy_read
from kernels.free_energy.ranges import Decision
from kernels.linear_attention import linear_attention, log_weights
from kernels.linear_attention.log_read import log_read
from kernels.linear_attention.op import features
from kernels.registered import registered


@operation("v")
def linear_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    eps: float | None = None,
    causal: bool = True,
    exact: bool | None = None,
    decision: Decision | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the two-level gated read o = gate * ((1 - lam) * mu + lam * F) over linear attention.

    The prior is p_t(i) ~ (q_t * exp(c_t - c_i)) . k_i, with c = cumsum(log_decay) and q, k >= 0,
    or relu(q) + eps and relu(k) + eps in place of q and k.

    Shapes: q, k [b, h, t, dk], log_decay [b, h, t] or [b, h, t, dk] or None; the other arguments
    and the result as in `free_energy_read`.
    Dtypes: q and k in the dtype of `linear_attention`'s products, to which the streams are rounded;
    v, lam, gate as in `free_energy_read`.
    exact: True runs the definition, in the compute dtype; None runs it where it is needed.
    decision: as in `free_energy_read`.
    implementation: of both operations.
    Raises ValueError in the same cases as both.
    """
    given = (q, k, v, log_decay, beta, lam, gate)
    if decision is None:
        return linear_read_at_once(
            *given, eps=eps, causal=causal, exact=exact, implementation=implementation
        )
    return _linear_read(*given, eps, causal, exact, implementation, decision)


@registered(lambda q, k, v, *_, **__: v.new_empty(v.shape), traceable=lambda *_, **__: False)
def linear_read_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    eps: float | None = None,
    causal: bool = True,
    exact: bool | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the result of `linear_read` without a decision.

    If the form is not known in advance, the call waits for the range.
    """
    return _linear_read(
        q, k, v, log_decay, beta, lam, gate, eps, causal, exact, implementation, None
    )


def _linear_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    eps: float | None,
    causal: bool,
    exact: bool | None,
    implementation: str,
    decision: Decision | None,
) -> Tensor:
    wide = torch.promote_types(v.dtype, torch.float32)

    def read(streams: Tensor) -> Tensor:
        made, _ = linear_attention(
            q,
            k,
            streams.to(q.dtype),
            log_decay,
            causal=causal,
            normalise=True,
            eps=eps,
            implementation=implementation,
        )
        return made.to(streams.dtype)

    def weights(start: int, stop: int) -> Tensor:
        q_of, k_of = (features(t, eps).to(wide) for t in (q, k))
        return log_weights(q_of, k_of, log_decay, start, stop, causal=causal)

    def logs(heads: Tensor, x: Tensor) -> Tensor:
        q_of, k_of = (features(t.flatten(0, 1).index_select(0, heads), eps).to(x) for t in (q, k))
        decay = None if log_decay is None else log_decay.flatten(0, 1).index_select(0, heads).to(x)
        return log_read(q_of, k_of, x, decay, causal=causal)

    terms = q.shape[-1] if log_decay is not None and log_decay.dim() == 4 else 1
    return free_energy_read(
        v,
        beta,
        lam,
        gate,
        read,
        weights,
        log_read=logs,
        terms=terms,
        exact=exact,
        decision=decision,
        products=q.dtype,
        implementation=implementation,
    )
