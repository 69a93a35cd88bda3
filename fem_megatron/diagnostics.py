"""Diagnostics of every layer's update on a sample of tokens: step norm, energies, entropies.

`observe` computes the quantities that all updates have. A mixer's specific quantities are computed
by a function in the mixer's folder, which uses the layer's own projections and energies. The class
attribute ``Update.diagnostics`` names this function.

The sample is the beginning of the first sequence. If documents are read separately, it is the
beginning of the longest document of the first sequence. It is treated as an independent sequence.
In a causal model its energies equal those of the same tokens in the full sequence. The module must
not import the trainer, a logger or file access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fem_megatron.block import Block
from fem_megatron.parallel import Parallel
from fem_megatron.shape import located
from fem_megatron.state import Context
from fem_megatron.update import Update

TOKENS = 256  # largest number of tokens in the sample

Quantities = dict[str, Tensor]
"""Name -> scalar tensor, equal on all tensor-parallel ranks."""


@dataclass(frozen=True)
class Sample:
    """Input and output of one update on the sampled tokens.

    x, after: the stream before and after the update, [n (/ tensor-parallel size under sequence
        parallelism), 1, D].
    context: positions and padding of the sample.
    tokens: [n], the indices 0, 1, ..., n - 1 of the sampled tokens.
    """

    x: Tensor
    after: Tensor
    context: Context
    tokens: Tensor


@contextmanager
def observing(blocks: Mapping[int, Block], tokens: int = TOKENS) -> Iterator[dict[str, float]]:
    """Record the diagnostics of each block's updates in the first forward pass inside this context.

    The blocks are unchanged after it.

    blocks: layer number in the full model -> block. All ranks of a tensor-parallel group must
        enter this context together.
    tokens: the largest number of tokens in the sample.

    The yielded dictionary is filled when the context ends: ``layer_03/mixer/step_norm`` (for a
    block with recurrence ``layer_03/iteration_01/mixer/step_norm``) -> value.

    ``step_norm`` is the mean of |x' - x| / |x|. ``activation_max`` is the largest |x'| of a
    channel. ``logit_max`` is the largest input of a softmax or sigmoid over tokens (scans have
    none). Energies and entropies (nats) are means over the sample. ``energy_rose`` is the share of
    tokens whose energy rose.
    """
    found: Quantities = {}
    numbers: dict[str, float] = {}
    handles = []
    for number, block in blocks.items():
        for part, update in (("mixer", block.mixer), ("mlp", block.mlp)):
            if update is not None:
                hook = _hook(f"layer_{number:02}", part, block.recurrence > 1, found, tokens)
                handles.append(update.register_forward_hook(hook))
    try:
        yield numbers
    finally:
        for handle in handles:
            handle.remove()
        numbers |= {name: float(value) for name, value in found.items()}


def _hook(
    layer: str, part: str, iterated: bool, found: Quantities, tokens: int
) -> Callable[[nn.Module, Any, Any], None]:
    looked: set[int] = set()

    def record_readings(
        update: nn.Module, arguments: tuple[Tensor, Context], output: Tensor
    ) -> None:
        x, context = arguments
        if context.iteration in looked:  # a later micro-batch, or the backward pass's recomputation
            return
        looked.add(context.iteration)
        assert isinstance(update, Update)
        place = (
            f"{layer}/iteration_{context.iteration:02}/{part}" if iterated else f"{layer}/{part}"
        )
        found.update(
            {
                f"{place}/{name}": value
                for name, value in observe(update, x, output, context, tokens).items()
            }
        )

    return record_readings


@torch.no_grad()
def observe(
    update: Update, x: Tensor, after: Tensor, context: Context, tokens: int = TOKENS
) -> Quantities:
    """Return the diagnostics, name -> scalar, of one update that changed x to ``after``.

    x, after: [s (/ tensor-parallel size under sequence parallelism), b, D]; only the first sequence
    is used. The context must not contain a decoding state.
    """
    parallel = update.parallel
    full = [parallel.enter(t.detach()[:, :1].contiguous()) for t in (x, after)]
    start, alone = (0, len(full[0])) if context.documents is None else context.documents.longest
    length = min(tokens, alone)
    split = len(full[0]) > len(x)
    if split:
        length -= length % parallel.size
    if not length:  # fewer tokens than ranks
        return _generic(*_tokens(update, full))
    full = [t[start : start + length] for t in full]
    sliced = [t.chunk(parallel.size)[parallel.rank] if split else t for t in full]
    positions = None if context.positions is None else context.positions[start : start + length]
    here = Context(
        positions=positions if positions is None or positions.ndim == 1 else positions[:, :1],
        valid=None if context.valid is None else context.valid[:1, :length],
        causal=context.causal,
        iteration=context.iteration,
    )
    sample = Sample(sliced[0], sliced[1], here, torch.arange(length, device=x.device))
    generic = _generic(*_tokens(update, full))
    # Eigenvalues of non-finite values would raise, but training handles such a step itself.
    if update.diagnostics is None or not full[1].isfinite().all():
        return generic
    more: Quantities = located(update.diagnostics)(update, sample)
    return generic | more


def _tokens(update: Update, streams: list[Tensor]) -> list[Tensor]:
    """Return only the token channels of each stream, without channels such as velocities."""
    return [stream[..., : update.hidden] for stream in streams]


def _generic(before: Tensor, after: Tensor) -> Quantities:
    return {
        "step_norm": (size(wide(after) - wide(before)) / size(before)).mean(),
        "activation_max": wide(after).abs().max(),
    }


def energies(name: str, before: Tensor, after: Tensor) -> Quantities:
    """Return the mean energies before and after the update, and the share that rose.

    name: prefix of the keys: ``{name}_before``, ``{name}_after`` and ``{name}_rose``. The last is
        the share of tokens whose energy rose.
    before, after: the energy of each token.
    """
    rose = (after > before).to(before.dtype).mean()
    return {f"{name}_before": before.mean(), f"{name}_after": after.mean(), f"{name}_rose": rose}


def step_energies(
    layer: Any, sample: Sample, *names: str
) -> tuple[Mapping[str, Tensor], Quantities]:
    """Return what the layer's ``diagnose`` measures before the update, and the quantities of it.

    names: energies of each token among the measurements, which are compared with those after the
        update (`energies`). The quantities include the largest score if the layer has scores.
    """
    before, after = (
        layer.diagnose(t, sample.context, sample.tokens) for t in (sample.x, sample.after)
    )
    found: Quantities = {}
    if "largest_score" in before:
        found["logit_max"] = layer.parallel.gather(before["largest_score"]).max()
    for name in names:
        found |= energies(name, before[name], after[name])
    return before, found


def largest_logit(scores: Tensor, seen: Tensor | None, parallel: Parallel) -> Quantities:
    """Return the largest score of all heads.

    scores: [b, local heads, n, keys], inputs of a softmax or sigmoid.
    seen: mask of the scores that count; None: all.
    """
    found = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).amax((0, 2, 3))
    return {"logit_max": parallel.gather(found).max()}


def quantiles(name: str, values: Tensor) -> Quantities:
    """Return the 10%, 50% and 90% quantiles of all values."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype, device=values.device)
    found = values.flatten().quantile(shares)
    return {f"{name}_{percent}": value for percent, value in zip((10, 50, 90), found, strict=True)}


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy in nats of weights [..., n], which are normalised first.

    Negative weights from rounding count as zero.
    """
    weights = weights.clamp_min(0.0)
    return torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1)


def size(x: Tensor) -> Tensor:
    """Return the Euclidean norm |x| of each token, in float32 or wider."""
    return torch.linalg.vector_norm(wide(x), dim=-1)


def wide(t: Tensor) -> Tensor:
    """Return t in float32 or wider."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
