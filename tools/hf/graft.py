"""Initialise a model with another mixer from a Transformer's weights: plan which parts of which
tensors are copied, and which tensors are new.

Attention has queries and keys (q, k), which are compared, values (v), which are read, and out_proj,
which maps the result to the residual stream. Copied to each target mixer:

    fem_softmax, fem_linear, fem_gla
        q, k if they are as wide as attention's (model.fem.budget "i");
        v and out_proj if model.fem.value_size equals attention's width
    fem_aft, fem_lrnn_decay, fem_mamba
        v and out_proj, on the same condition; their weights contain no q and k like attention's
    transformer with another number of key/value groups
        q, out_proj; k and v, repeated for each group, if fewer queries share them in the target
    cem
        query, key: its energy is of q.k; values and output use the same two matrices by definition
    mha2nd1st, mha2nd, energy_linear
        q, k; their keys are also the values, so out_proj has another input and is new
    differential
        q, k with half the heads (two heads of attention form one); v, out_proj
    deltanet, gated_deltanet, mamba2
        those of q, k, v that are as wide as attention's; out_proj if v is copied
    energy_transformer
        query, key: its energy is of q.k; values and output use the same two matrices by definition
    hyperset, nrgpt
        no part: one matrix is query, key and value

SwiGLU MLPs are copied completely. In a cem MLP, ``up`` (inside SiLU) receives the gate projection,
``gamma`` (its factor) the up projection; the output matrix is the transpose of ``up``.

Channels of a head stay together, and heads keep their order. The norms of q and k (model.qk_norm)
are copied with them. All other weights are initialised as in training, from the run's seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from fem_common.errors import ConfigError
from fem_common.text import aligned, ranges
from fem_megatron.catalogue import mixer_names
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionShape
from fem_megatron.shape import Packing, Shape, SwiGluShape
from pretrain.plan.run_plan import model_weights

from .stock import QKV, grouped
from .weight_conversion import padded

PACKED = "in_proj.weight"
Fill = Callable[[Tensor, list[Tensor]], Tensor]


@dataclass(frozen=True)
class Origin:
    """Origin of one tensor of the target model.

    sources: names of the tensors of the source model that ``fill`` uses. copied: number of copied
    elements. fill: function (initialised tensor, source tensors) -> tensor. parts: names of the
    copied parts, for the user; empty if the entire tensor is copied. taken: parts of the source
    tensors that are used.
    """

    sources: tuple[str, ...]
    copied: int
    fill: Fill
    parts: tuple[str, ...] = ()
    taken: frozenset[str] = frozenset()


Origins = dict[str, Origin]
"""Name of a tensor of the target -> its origin. Tensors without an entry are new."""


@dataclass(frozen=True)
class Graft:
    """Plan for a target model.

    origins: tensor of the target -> its origin; tensors without an entry are new. left: parts of
    the source model that are not used.
    """

    target: ModelConfig
    origins: Origins
    left: tuple[str, ...]


def check_target(source: ModelConfig, target: ModelConfig) -> None:
    """Raise ConfigError if no layer of the target can use the source's weights, or if its mixer
    belongs to another package.
    """
    for key in ("hidden_size", "num_layers", "vocab_size", "causal"):
        ours, theirs = getattr(target, key), getattr(source, key)
        if ours != theirs:
            raise ConfigError(
                f"--mixer: model.{key} is {ours}, but {theirs} in the folder; both must be equal"
                " for weights to be copied"
            )
    for layer, (have, want, name) in enumerate(
        zip(source.blocks(), target.blocks(), mixer_names(target), strict=True)
    ):
        if want.mixer.external:
            raise ConfigError(
                f"--mixer {name}: a layer of another package, whose parameters this tool cannot"
                " initialise"
            )
        if have.mixer != want.mixer and not isinstance(have.mixer, AttentionShape):
            raise ConfigError(
                f"--mixer requires the weights of a Transformer, but layer {layer} of the folder is"
                f" {mixer_names(source)[layer]}; import it without --mixer"
            )


def graft(source: ModelConfig, target: ModelConfig) -> Graft:
    """Return the plan to initialise ``target`` from the weights of ``source``.

    The target must have passed ``check_target``.
    """
    have, want = model_weights(source), model_weights(target)
    origins: Origins = {}
    embedding = "embedding.word_embeddings.weight"
    output = "output_layer.weight"
    norm = "decoder.final_layernorm.weight"
    for name in {embedding, output, norm} & want.keys():
        theirs = name if name in have else embedding
        fill = _rows(want[name].shape[0])
        origins[name] = Origin((theirs,), want[name].size, fill, taken=frozenset({theirs}))
    pairs = zip(source.blocks(), target.blocks(), strict=True)
    layers = [(f"decoder.layers.{layer}.", *pair) for layer, pair in enumerate(pairs)]
    for number in range(min(source.mtp_depth, target.mtp_depth)):
        module, outside = f"mtp_modules.{number}.", target.mtp.own_weights()
        layers.append((f"{module}block.", source.mtp.block, target.mtp.block))
        own = {name: _unchanged(name, weight.size) for name, weight in outside.items()}
        origins |= _renamed(own, module)
    for prefix, ours, block in layers:
        found = _renamed(_mixer(ours.mixer, block.mixer), "mixer.")
        if ours.mlp is not None and block.mlp is not None:
            found |= _renamed(_mlp(ours.mlp, block.mlp), "mlp.")
        origins |= _renamed(found, prefix)
    origins = {name: origins[name] for name in want if name in origins}
    taken = frozenset().union(*(origin.taken for origin in origins.values()))
    left = []
    for name in have:
        left += [part for part in _parts_of(name, source) if part not in taken]
    return Graft(target, origins, tuple(left))


# --- table ----------------------------------------------------------------------------------------


def described(plan: Graft) -> dict[str, Any]:
    """Return the plan as a dictionary for JSON: copied and new tensors, sums, unused parts.

    Equal tensors of several layers share one entry. Entries have the order of the model.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[tuple[list[int], int, int]]] = {}
    for name, weight in model_weights(plan.target).items():
        origin = plan.origins.get(name)
        general, numbers = _general(name)
        copied = 0 if origin is None else origin.copied
        parts: tuple[str, ...] = ()
        if origin is None:
            status = "new"
        elif copied == weight.size:
            status = "copied"
        else:
            status = "partly"
            parts = origin.parts
        entry = (numbers, weight.size, copied)
        groups.setdefault((general, status, parts), []).append(entry)
    tensors: list[dict[str, Any]] = []
    for (name, status, parts), found in groups.items():
        tensors.append(
            {
                "name": name,
                "layers": ranges(chain.from_iterable(layers for layers, _, _ in found), ","),
                "status": status,
                "parts": list(parts),
                "parameters": sum(size for _, size, _ in found),
                "copied": sum(copied for _, _, copied in found),
            }
        )
    sums = {key: sum(tensor[key] for tensor in tensors) for key in ("parameters", "copied")}
    return {"format": 1, "tensors": tensors, **sums, "left_behind": _generalised(plan.left)}


def table(found: dict[str, Any]) -> list[str]:
    """Return the result of ``described`` as lines of text for the user.

    The lines contain one row per tensor (copied parts, numbers of elements), the sums, and the
    unused parts of the source.
    """
    cells = [("tensor", "layers", "", "parameters", "copied")]
    total = f"{100 * found['copied'] / found['parameters']:.1f}% copied"
    for row in (
        *found["tensors"],
        {"name": "all", "layers": "", "status": total, "parts": (), **found},
    ):
        status = f"{row['status']}: {', '.join(row['parts'])}" if row["parts"] else row["status"]
        cells.append(
            (row["name"], row["layers"], status, f"{row['parameters']:,}", f"{row['copied']:,}")
        )
    return [
        *aligned(cells, (0, 1, 2)),
        f"weights of the folder that are not used: {'; '.join(found['left_behind']) or 'none'}",
    ]


def _general(name: str) -> tuple[str, list[int]]:
    """Return a tensor's name with N as the number of its layer, and a list of that number.

    The list is empty outside the layers.
    """
    found = re.match(r"(decoder\.layers|mtp_modules)\.(\d+)\.(.*)", name)
    return (f"{found[1]}.N.{found[3]}", [int(found[2])]) if found else (name, [])


def _generalised(names: tuple[str, ...]) -> list[str]:
    """Return the names of tensor parts with equal names of several layers joined.

    Example of an entry: ``decoder.layers.N.mixer.in_proj.weight (0-3): q, k``.
    """
    layers: dict[str, list[int]] = {}
    for name in names:
        general, numbers = _general(name)
        layers.setdefault(general, []).extend(numbers)
    parts: dict[str, list[str]] = {}
    for general, numbers in layers.items():
        tensor, _, part = general.partition(": ")
        parts.setdefault(f"{tensor} ({ranges(numbers, ',')})" if numbers else tensor, []).extend(
            [part] if part else []
        )
    return [f"{tensor}: {', '.join(found)}" if found else tensor for tensor, found in parts.items()]


# --- one layer ------------------------------------------------------------------------------------


def _mixer(source: Shape, target: Shape) -> Origins:
    if source == target:
        return {name: _unchanged(name, weight.size) for name, weight in source.weights().items()}
    assert isinstance(source, AttentionShape)
    want = target.weights()
    origins: Origins = {}
    # The Energy Transformer's norm has one number for all channels.
    if "norm.weight" in want and want["norm.weight"].size == source.hidden:
        origins["norm.weight"] = _unchanged("norm.weight", source.hidden)
    for name in (
        found for found in source.weights() if found in ("q_norm.weight", "k_norm.weight")
    ):
        for theirs in (
            key for key, weight in want.items() if key.endswith(name) and weight.size == source.head
        ):
            origins[theirs] = Origin(
                (name,), source.head, lambda _, tensors: tensors[0], taken=frozenset({name})
            )
    if isinstance(target, AttentionShape):
        return origins | _regrouped(source, target)
    read = False
    for name, packing in target.packing().items():
        fitting = {
            part: role
            for part, role in packing.roles.items()
            if packing.widths[part] and _fits(source, packing, part, role)
        }
        read |= "v" in fitting.values()
        if fitting:
            size = sum(packing.heads * packing.widths[part] for part in fitting) * source.hidden
            taken = frozenset(f"{PACKED}: {role}" for role in fitting.values())
            origins[name] = Origin(
                (PACKED,), size, _repacked(source, packing, fitting), tuple(fitting), taken
            )
    if read and want["out_proj.weight"].shape == source.weights()["out_proj.weight"].shape:
        origins["out_proj.weight"] = _unchanged("out_proj.weight", want["out_proj.weight"].size)
    return origins


def _fits(source: AttentionShape, packing: Packing, part: str, role: str) -> bool:
    """Return True if attention's heads can be copied into one part of a packed matrix.

    part: its name; role: q, k or v. Per head of the target, the part must be as wide as one head of
    attention, or, if a head of the target has several queries, as the same number of heads.
    """
    width, queries = packing.widths[part], packing.queries
    if packing.heads == source.heads and width == source.head:
        return queries == 1 or role == "v"
    return (
        queries > 1 and queries * packing.heads == source.heads and width == queries * source.head
    )


def _regrouped(source: AttentionShape, target: AttentionShape) -> Origins:
    """Return the origins for attention whose heads share keys and values in other groups.

    Keys and values are copied if the target's number of groups is a multiple of the source's; else
    only queries and out_proj. The result is empty if the heads differ.
    """
    if (target.heads, target.head) != (source.heads, source.head):
        return {}
    want = target.weights()
    shared = target.groups % source.groups == 0
    kept = ("q", "k", "v") if shared else ("q",)
    origins = {"out_proj.weight": _unchanged("out_proj.weight", want["out_proj.weight"].size)}
    for name in (PACKED, "in_proj.bias"):
        if name in want and name in source.weights():
            rows = target.heads * target.head + (2 * target.groups * target.head if shared else 0)
            size = rows * want[name].size // want[name].shape[0]
            taken = frozenset(f"{name}: {part}" for part in kept)
            origins[name] = Origin((name,), size, _regroup(source, target, kept), kept, taken)
    return origins


def _mlp(source: Shape, target: Shape) -> Origins:
    want, have = target.weights(), source.weights()
    if type(source) is type(target):
        return {
            name: _unchanged(name, want[name].size)
            for name in want
            if name in have and have[name].shape == want[name].shape
        }
    origins = {"norm.weight": _unchanged("norm.weight", want["norm.weight"].size)}
    if isinstance(source, SwiGluShape):
        for name, packing in target.packing().items():
            (part,) = packing.roles.values()
            half = ("gate", "up").index(part)
            if want[name].shape == (source.inner, source.hidden):
                taken = frozenset({f"gate_up: {part}"})
                origins[name] = Origin(("gate_up",), want[name].size, _half(half), taken=taken)
    return origins


# --- tensors --------------------------------------------------------------------------------------


def _heads(packed: Tensor, shape: AttentionShape, groups: int | None = None) -> dict[str, Tensor]:
    """Split packed rows of attention by head.

    Args:
        packed: in_proj [rows, ...] of attention with this ``shape``.
        groups: number of groups to which k and v are repeated; None: one per head.

    Returns:
        q [heads, d, ...], k and v [groups, d, ...], with d the width of a head.
    """
    q, k, v = (part.flatten(0, 1) for part in grouped(packed, shape))
    again = (groups or shape.heads) // shape.groups
    return {"q": q, "k": k.repeat_interleave(again, 0), "v": v.repeat_interleave(again, 0)}


def _repacked(source: AttentionShape, packing: Packing, fitting: dict[str, str]) -> Fill:
    """Return the ``fill`` function (see ``Origin``) that copies attention's heads into a packed
    tensor.

    fitting: part of the packed tensor -> q, k or v. Other parts keep their initial values.
    """

    def fill(start: Tensor, tensors: list[Tensor]) -> Tensor:
        parts = _heads(tensors[0], source)
        slices = start.unflatten(0, (packing.heads, -1)).split(list(packing.widths.values()), dim=1)
        for name, piece in zip(packing.widths, slices, strict=True):
            if name in fitting:
                piece.copy_(parts[fitting[name]].reshape(piece.shape))
        return start

    return fill


def _regroup(source: AttentionShape, target: AttentionShape, kept: tuple[str, ...]) -> Fill:
    def fill(start: Tensor, tensors: list[Tensor]) -> Tensor:
        parts = _heads(tensors[0], source, target.groups if "k" in kept else None)
        for part, piece in zip(QKV, grouped(start, target), strict=True):
            if part in kept:
                piece.copy_(parts[part].unflatten(0, (target.groups, -1)))
        return start

    return fill


def _rows(rows: int) -> Fill:
    """Return the copy of all rows; rows of further padding of the vocabulary are zero."""
    return lambda start, tensors: padded(tensors[0][:rows], rows)


def _half(half: int) -> Fill:
    """Return the copy of the gate (0) or the up projection (1) of SwiGLU."""
    return lambda start, tensors: tensors[0][half]


def _unchanged(name: str, size: int) -> Origin:
    return Origin((name,), size, lambda _, tensors: tensors[0], taken=frozenset(_all_of(name)))


def _renamed(origins: Origins, prefix: str) -> Origins:
    """Return the origins with ``prefix`` before all names of tensors and parts."""
    renamed = {}
    for name, origin in origins.items():
        sources = tuple(prefix + source for source in origin.sources)
        taken = frozenset(prefix + part for part in origin.taken)
        renamed[prefix + name] = replace(origin, sources=sources, taken=taken)
    return renamed


def _all_of(name: str) -> list[str]:
    """Return the parts of a tensor of attention or SwiGLU, named as in ``Origin.taken``."""
    parts = {"in_proj.weight": "qkv", "in_proj.bias": "qkv", "gate_up": ("gate", "up")}.get(name)
    return [name] if parts is None else [f"{name}: {part}" for part in parts]


def _parts_of(name: str, source: ModelConfig) -> list[str]:
    """Return the parts of a tensor (see ``_all_of``), given its name in the full model."""
    found = re.match(
        r"((?:decoder\.layers\.\d+|mtp_modules\.\d+\.block)\.(?:mixer|mlp)\.)(.*)", name
    )
    return [found[1] + part for part in _all_of(found[2])] if found else [name]
