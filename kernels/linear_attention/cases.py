"""Cases of linear attention: decays of different strength together, resets, tiny features, rows
that read no token, signed features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.linear_attention.op import features, linear_attention


def _random(
    size: Mapping[str, int],
    decay: str = "none",
    *,
    strength: float = 0.3,
    normalise: bool = True,
    initial: bool = False,
    eps: float | None = None,
) -> Inputs:
    """Draw features in [0, 1], or signed ones if not normalised or before relu(x) + eps; log-decays
    are uniform down to -strength.
    """
    uniform = Draw(size["tokens"]).uniform
    shape = size["batch"], size["heads"], size["tokens"]

    keys, values = size["keys"], size["values"]
    signed = not normalise or eps is not None
    q, k = (uniform(*shape, keys) - 0.5 * signed for _ in range(2))
    made: Inputs = {"q": q, "k": k, "v": 2 * uniform(*shape, values) - 1, "normalise": normalise}
    if decay != "none":
        made["log_decay"] = -strength * uniform(*shape, *([keys] if decay == "channel" else []))
    if eps is not None:
        made["eps"] = eps
        made["q"][:, :, -2:] = 0  # relu has no gradient at 0
        made["k"][..., -1] = 0
    if initial:
        made["initial"] = uniform(*shape[:2], keys, values + normalise)
    return made


def _mixed(size: Mapping[str, int], decay: str) -> Inputs:
    """Draw inputs with steps of -1e6, -40 and full resets among steps of about -1e-3."""
    made = _random(size, decay, strength=2e-3, initial=True)
    tokens = size["tokens"]
    for place, log_decay in ((0, -40.0), (1, -1e6), (5, -torch.inf), (6, -40.0), (7, -40.0)):
        made["log_decay"][:, :, place :: max(11, tokens // 8)] = log_decay
    return made


def _some_channels(size: Mapping[str, int]) -> Inputs:
    """Draw inputs whose channels have resets at different places."""
    made = _random(size, "channel", strength=0.02)
    drawn = Draw(1).uniform(*made["log_decay"].shape)
    made["log_decay"][drawn < 0.1] = -torch.inf
    made["log_decay"][(drawn > 0.1) & (drawn < 0.2)] = -30.0
    return made


def _faint(size: Mapping[str, int], decay: str) -> Inputs:
    """Draw inputs whose features are all 1e-6, like those of a closed ReLU: weights are about 1e-12
    in the first rows and after a reset.
    """
    made = _random(size, decay)
    tokens = size["tokens"]
    made["k"][:, :, : tokens // 4] = 1e-6
    made["q"][:, :, tokens // 8 : tokens // 2] = 1e-6
    if decay != "none":
        made["log_decay"][:, :, tokens // 2] = -torch.inf
        made["k"][:, :, tokens // 2 : tokens // 2 + 4] = 1e-6
    return made


def _nothing(size: Mapping[str, int], decay: str) -> Inputs:
    """Draw rows that read no token: before the first key, after a reset, with a query of zeros."""
    made = _random(size, decay)
    tokens = size["tokens"]
    made["k"][:, :, :3] = 0
    made["q"][:, :, -2] = 0
    if decay != "none":
        made["log_decay"][:, :, tokens // 2] = -torch.inf
        made["k"][:, :, tokens // 2 : tokens // 2 + 3] = 0
    return made


def _equal(size: Mapping[str, int]) -> Inputs:
    """Draw equal values and a state with other values; without the state, the weights' gradients
    would be rounding errors alone.
    """
    made = _random(size, "head", initial=True)
    made["v"][:] = 0.75
    return made


def weights_and_decays(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return all weights [b, h, t, i], the decay factors between i and t [b, h, t, i, 1 or dk], and
    the log-decays [b, h, t, 1 or dk].

    Sums of log-decays over (i, t] are computed term by term.
    """
    q, k = (features(x[name], x.get("eps")) for name in "qk")
    tokens = q.shape[2]
    decay = x.get("log_decay", torch.zeros_like(q[..., 0]))
    decay = decay if decay.dim() == 4 else decay[..., None]
    late = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    steps = (
        decay[:, :, :, None].expand(-1, -1, -1, tokens, -1).masked_fill(late.triu()[..., None], 0)
    )
    kept = steps.cumsum(2).masked_fill(late.triu(1)[..., None], -torch.inf).exp()
    if not x.get("causal", True):
        kept = torch.where(late.triu(1)[..., None], kept.transpose(2, 3), kept)
    weights = (
        (q[:, :, :, None] * k[:, :, None] * kept).sum(-1)
        if decay.shape[-1] > 1
        else (q @ k.mT) * kept[..., 0]
    )
    return weights, kept, decay


def _definition(x: Inputs) -> Outputs:
    """Compute all weights at once."""
    q, k = (features(x[name], x.get("eps")) for name in "qk")
    v, normalise, initial = x["v"], x["normalise"], x.get("initial")
    weights, kept, decay = weights_and_decays(x)
    values = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v
    y, state = weights @ values, (k * kept[:, :, -1]).mT @ values
    if initial is not None:
        since = decay.cumsum(2).exp()
        y = y + (q * since) @ initial
        state = state + since[:, :, -1, :, None] * initial
    if normalise:
        mass = y[..., -1:]
        empty = mass <= 0
        y = torch.where(empty, v, y[..., :-1] / mass.masked_fill(empty, 1))
    return y, state


def _call(x: Inputs, implementation: str) -> Outputs:
    if "initial" in x:  # states are float32 at least
        x = {**x, "initial": x["initial"].to(torch.promote_types(x["q"].dtype, torch.float32))}
    return linear_attention(**x, implementation=implementation)


SUITE = Suite(
    op="linear_attention",
    cases={
        "no decay": _random,
        "a decay a head": lambda size: _random(size, "head"),
        "a decay a channel": lambda size: _random(size, "channel"),
        "no decay, with a state": lambda size: _random(size, initial=True),
        "a decay a head, with a state": lambda size: _random(size, "head", initial=True),
        "a decay a channel, with a state": lambda size: _random(size, "channel", initial=True),
        "plain": lambda size: _random(size, normalise=False, initial=True),
        "plain, a decay a head": lambda size: _random(size, "head", normalise=False, initial=True),
        "plain, a decay a channel": lambda size: _random(
            size, "channel", normalise=False, initial=True
        ),
        "relu": lambda size: _random(size, eps=1e-3),
        "relu, a decay a head": lambda size: _random(size, "head", initial=True, eps=1e-3),
        "relu, a decay a channel": lambda size: _random(size, "channel", initial=True, eps=1e-3),
        "relu, plain": lambda size: _random(size, "head", normalise=False, eps=1e-3),
        "strong and weak, a head": lambda size: _mixed(size, "head"),
        "strong and weak, a channel": lambda size: _mixed(size, "channel"),
        "resets of single channels": _some_channels,
        "all strong, a head": lambda size: _random(size, "head", strength=12.0),
        "all strong, a channel": lambda size: _random(size, "channel", strength=12.0),
        "faint tokens": lambda size: _faint({**size, "heads": 4}, "none"),
        "faint tokens, a decay a head": lambda size: _faint(size, "head"),
        "faint tokens, a decay a channel": lambda size: _faint(size, "channel"),
        "rows that read nothing": lambda size: _nothing(size, "none"),
        "rows that read nothing, a decay a head": lambda size: _nothing(size, "head"),
        "rows that read nothing, a decay a channel": lambda size: _nothing(size, "channel"),
        "equal values": _equal,
        "one token": lambda size: _random({**size, "heads": 8, "tokens": 1}, "head", initial=True),
        "one channel, plain": lambda size: _random({**size, "keys": 1}, "head", normalise=False),
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 1, "tokens": 37, "keys": 12, "values": 20},
    real={"batch": 1, "heads": 2, "tokens": 1001, "keys": 64, "values": 96},
    loose={},
)
