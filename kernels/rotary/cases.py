"""Cases of RoPE: queries and keys as tensors or slices of a projection, fewer keys than queries or
none, positions of packed documents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.rotary.op import rotary


def angles(
    positions: Tensor, width: int, kind: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [s, 1 or b, 1, width / 2] of positions [s] or [s, b]."""
    half = width // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    found = (positions.to(device).double()[..., None] * speed).view(len(positions), -1, 1, half)
    return found.cos().to(kind), found.sin().to(kind)


def by_matrix(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [s, b, heads, d] times each token's rotation matrix."""
    c, s = (torch.diag_embed(t) for t in angles(positions, x.shape[-1], x.dtype, x.device))
    return (torch.cat((torch.cat((c, -s), -1), torch.cat((s, c), -1)), -2) @ x[..., None])[..., 0]


def places(tokens: int, batch: int, *, packed: bool) -> Tensor:
    """Return positions, [s], or [s, b] if packed: each sequence has different documents."""
    place = torch.arange(tokens)
    return torch.stack([place % (5 + 7 * n) for n in range(batch)], 1) if packed else place


def _made(
    size: Mapping[str, int],
    heads: tuple[int, ...],
    *,
    packed: bool = False,
    sliced: bool = False,
    narrow: bool = False,
    first: int = 0,
) -> Inputs:
    """Draw inputs. heads: of q, and of k if present. sliced: q, k and values are interleaved by
    head in one tensor. narrow: angles in q's type.
    """
    draw, tokens, batch = Draw(size["tokens"]), size["tokens"], size["batch"]
    parts = {
        name: draw.normal(tokens, batch, n, size["width"])
        for name, n in zip("qk", heads, strict=False)
    }
    if sliced:
        parts = {"z": draw.normal(tokens, batch, heads[0], 3 * size["width"])}
    return {**parts, "positions": first + places(tokens, batch, packed=packed), "narrow": narrow}


def _parts(x: Inputs) -> list[Tensor]:
    return list(x["z"].chunk(3, -1)[:2]) if "z" in x else [x[name] for name in "qk" if name in x]


def _definition(x: Inputs) -> Outputs:
    return tuple(by_matrix(part, x["positions"]) for part in _parts(x))


def _call(x: Inputs, implementation: str) -> Outputs:
    q, *rest = _parts(x)
    k = rest[0] if rest else None
    kind = q.dtype if x["narrow"] else torch.promote_types(q.dtype, torch.float32)
    cos, sin = angles(x["positions"], q.shape[-1], kind, q.device)
    return tuple(rotary(q, k, cos, sin, implementation=implementation))


SUITE = Suite(
    op="rotary",
    cases={
        "normal": lambda size: _made(size, (size["heads"], size["heads"])),
        "packed documents": lambda size: _made(size, (size["heads"], size["heads"]), packed=True),
        "grouped": lambda size: _made(size, (2 * size["heads"], size["heads"])),
        "keys alone": lambda size: _made(size, (size["heads"],), packed=True),
        "slices": lambda size: _made(size, (size["heads"], size["heads"]), sliced=True),
        "narrow angles": lambda size: _made(size, (size["heads"], 1), sliced=True, narrow=True),
        "one token behind a past": lambda size: _made(
            {**size, "tokens": 1}, (size["heads"], size["heads"]), first=1000
        ),
    },
    definition=_definition,
    call=_call,
    small={"tokens": 13, "batch": 2, "heads": 3, "width": 6},
    real={"tokens": 1021, "batch": 2, "heads": 16, "width": 128},
    loose={},
)
