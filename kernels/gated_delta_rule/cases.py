"""Cases of `gated_delta_rule`: with and without decays, from a state, one token, odd lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.gated_delta_rule.op import gated_delta_rule

Size = Mapping[str, int]


def inputs(
    size: Size, *, tokens: int | None = None, decay: float | None = 0.1, state: bool = False
) -> Inputs:
    """Draw unit q and k, random v, beta in (0, 1), and log-decays around -decay."""
    draw = Draw(0)
    normal = draw.normal
    b, h, t, dk, dv = size["batch"], size["heads"], tokens or size["tokens"], size["dk"], size["dv"]

    q, k = (torch.nn.functional.normalize(normal(b, h, t, dk), dim=-1) for _ in range(2))
    x: Inputs = {"q": q, "k": k, "v": normal(b, h, t, dv), "beta": torch.sigmoid(normal(b, h, t))}
    x["log_decay"] = None if decay is None else -decay * draw.uniform(b, h, t)
    return x | {"initial": normal(b, h, dk, dv) if state else None}


def definition(x: Inputs) -> Outputs:
    """Compute the recurrence, one token at a time."""
    q, k, v, beta, log_decay, state = (
        x[name] for name in ("q", "k", "v", "beta", "log_decay", "initial")
    )
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[2]):
        state = state if log_decay is None else state * log_decay[:, :, t, None, None].exp()
        key = k[:, :, t, :, None]
        state = (
            state + key * (beta[:, :, t, None] * (v[:, :, t] - (key * state).sum(-2)))[:, :, None]
        )
        outputs.append((q[:, :, t, :, None] * state).sum(-2) * q.shape[3] ** -0.5)
    return torch.stack(outputs, dim=2), state


def call(x: Inputs, implementation: str) -> Outputs:
    """Call the public function; with bfloat16 inputs the state is float32."""
    initial = (
        None
        if x["initial"] is None
        else x["initial"].to(torch.promote_types(x["q"].dtype, torch.float32))
    )
    tensors = (x["q"], x["k"], x["v"], x["beta"], x["log_decay"], initial)
    return gated_delta_rule(*tensors, chunk=x.get("chunk", 64), implementation=implementation)


CASES: dict[str, Callable[[Size], Inputs]] = {
    "normal": inputs,
    "no decay": lambda size: inputs(size, decay=None),
    "strong decay": lambda size: inputs(size, decay=20.0),
    "a state": lambda size: inputs(size, state=True),
    "one token": lambda size: inputs(size, tokens=1, state=True),
    "a chunk and one": lambda size: inputs(size, tokens=65),
}

SUITE = Suite(
    op="gated_delta_rule",
    cases=CASES,
    definition=definition,
    call=call,
    small={"batch": 1, "heads": 2, "tokens": 37, "dk": 16, "dv": 16},
    real={"batch": 2, "heads": 4, "tokens": 509, "dk": 64, "dv": 64},
    loose={},
)
