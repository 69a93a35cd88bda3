"""Definition of workloads and baselines: inputs at production shapes, calls and minimum FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from kernels.fem_attention.engines import ENGINES, Reading

Inputs = dict[str, Any]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Size:
    """Shape of a call.

    batch: number of sequences.
    tokens: length of each sequence.
    heads: number of heads.
    key: width of a head's queries and keys.
    value: width of a head's values.
    """

    batch: int
    tokens: int
    heads: int
    key: int
    value: int

    @property
    def pairs(self) -> float:
        """Number of query-key pairs of all heads and sequences under a causal mask."""
        return self.batch * self.heads * self.tokens * (self.tokens + 1) / 2

    @property
    def rows(self) -> float:
        """Number of tokens of all heads and sequences: batch * heads * tokens."""
        return float(self.batch * self.heads * self.tokens)

    def wider(self, factor: int) -> Size:
        """Return this size with values ``factor`` times as wide."""
        return replace(self, value=factor * self.value)


class Draw:
    """Generator of random tensors of one dtype on one device, which require gradients.

    Equal seeds give equal numbers.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.rng = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *shape: int, change: Callable[[Tensor], Tensor] = lambda x: x, wide: bool = False
    ) -> Tensor:
        """Return a tensor of the given shape: ``change`` applied to standard normal numbers.

        wide: return float32, whatever the dtype of the generator is.
        """
        drawn = torch.randn(shape, generator=self.rng, device=self.device)
        return change(drawn).to(torch.float32 if wide else self.dtype).requires_grad_()

    def heads(
        self,
        size: Size,
        width: int,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        *,
        wide: bool = False,
    ) -> Tensor:
        """Return a [batch, heads, tokens, width] view of a [tokens, batch, heads, width] tensor.

        The latter is the memory layout in the layers. The numbers are those of `normal`.
        """
        drawn = torch.randn(
            size.tokens, size.batch, size.heads, width, generator=self.rng, device=self.device
        )
        return (
            change(drawn)
            .to(torch.float32 if wide else self.dtype)
            .permute(1, 2, 0, 3)
            .requires_grad_()
        )

    def packed(self, *shape: int, parts: int) -> tuple[Tensor, ...]:
        """Return ``parts`` tensors of the given shape that are interleaved in memory.

        The slices of a projection have this layout.
        """
        drawn = torch.randn(*shape, parts, generator=self.rng, device=self.device).to(self.dtype)
        return tuple(part.requires_grad_() for part in drawn.unbind(-1))

    def steps(
        self, size: Size, change: Callable[[Tensor], Tensor], *, wide: bool = False
    ) -> Tensor:
        """Return a random [batch, heads, tokens] tensor, with one number per token and head."""
        return self.normal(size.batch, size.heads, size.tokens, change=change, wide=wide)


def no_products(size: Size) -> tuple[float, float]:
    """Return (0, 0), the matrix FLOPs of an operation without matrix products."""
    return 0.0, 0.0


@dataclass(frozen=True)
class Baseline:
    """Computation that an operation is compared with.

    inputs(draw, size): dictionary of its input tensors.
    call(inputs): its outputs.
    flops(size): matrix FLOPs of a forward and of a backward pass.
    engine: this project's implementation that runs on the same attention engine, or None.
    lacks(device): the reason why the baseline cannot run on the device, or None.
    """

    name: str
    inputs: Callable[[Draw, Size], Inputs]
    call: Callable[[Inputs], Outputs]
    flops: Callable[[Size], tuple[float, float]] = no_products
    lacks: Callable[[torch.device], str | None] = lambda device: None
    engine: str | None = None


@dataclass(frozen=True)
class Workload:
    """Operation as a layer of this project calls it.

    name: name of the workload.
    op: name of the operation (``kernels.implementations``).
    inputs(draw, size): dictionary of its input tensors.
    call(inputs, implementation): its outputs.
    flops(size): minimum matrix FLOPs of a forward and of a backward pass (a multiply-add counts
        as two); 0 without matrix products.
    heads, key, value: shape in the 1.3B model.
    small: (heads, key, value) for a CPU.
    baselines: name in ``BASELINES`` -> function from the workload's size to the baseline's size
        with the same amount of data.
    """

    name: str
    op: str
    inputs: Callable[[Draw, Size], Inputs]
    call: Callable[[Inputs, str], Outputs]
    flops: Callable[[Size], tuple[float, float]] = no_products
    heads: int = 16
    key: int = 128
    value: int = 64
    small: tuple[int, int, int] = (2, 32, 16)
    baselines: Mapping[str, Callable[[Size], Size]] = field(default_factory=dict)

    def size(self, tokens: int, total: int) -> Size:
        """Return the production shape.

        It has ``total`` tokens in sequences of ``tokens``, but at least one sequence.
        """
        return Size(max(1, total // tokens), tokens, self.heads, self.key, self.value)

    def small_size(self, tokens: int) -> Size:
        """Return the shape for a CPU: one sequence of ``tokens`` tokens."""
        return Size(1, tokens, *self.small)


def per_pair(widths: Callable[[Size], float]) -> Callable[[Size], tuple[float, float]]:
    """Return the FLOPs function of attention, with ``widths`` multiply-adds per query-key pair.

    The backward pass recomputes the scores and needs 2.5 times the forward FLOPs.
    """
    return lambda size: (2 * size.pairs * widths(size), 5 * size.pairs * widths(size))


def per_token(products: Callable[[Size], float]) -> Callable[[Size], tuple[float, float]]:
    """Return the FLOPs function of a recurrence, with ``products`` multiply-adds per token.

    The backward pass needs twice the forward FLOPs.
    """
    return lambda size: (2 * size.rows * products(size), 4 * size.rows * products(size))


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def queries_and_keys(draw: Draw, size: Size) -> Inputs:
    """Return q and k of attention."""
    return {name: draw.heads(size, size.key) for name in ("q", "k")}


def attention_inputs(draw: Draw, size: Size) -> Inputs:
    """Return q, k, v of standard attention."""
    return {**queries_and_keys(draw, size), "v": draw.heads(size, size.value)}


def by_name(op: Callable[..., Any]) -> Callable[[Inputs, str], Outputs]:
    """Return a call that passes the inputs to an operation as keyword arguments.

    The call returns only the first result of the operation, as a tuple.
    """

    def call(inputs: Inputs, implementation: str) -> Outputs:
        found = op(**inputs, implementation=implementation)
        return (found[0] if isinstance(found, tuple) else found,)

    return call


def _torchs(backends: list[SDPBackend]) -> Callable[[Inputs], Outputs]:
    """Return a call of torch's causal attention.

    backends: the only backends that torch may use; an empty list allows all.
    """

    def call(inputs: Inputs) -> Outputs:
        with sdpa_kernel(backends) if backends else nullcontext():
            return (
                scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True),
            )

    return call


def _by_engine(name: str) -> Callable[[Inputs], Outputs]:
    """Return a call of standard attention by the engine ``name`` of ``kernels.fem_attention``.

    It is used for engines that scaled_dot_product_attention does not offer.
    """

    def call(inputs: Inputs) -> Outputs:
        q, k, v = (inputs[part] for part in ("q", "k", "v"))
        return (ENGINES[name].attend(q, k, v, Reading(causal=True, scale=q.shape[-1] ** -0.5)),)

    return call


def needs_gpu(device: torch.device) -> str | None:
    """Return the reason why a GPU kernel cannot run on ``device``, or None."""
    return None if device.type != "cpu" else "no GPU"


def needs_fla(device: torch.device) -> str | None:
    """Return the reason why flash-linear-attention's kernels cannot run on ``device``, or None."""
    reason = needs_gpu(device)
    if reason is None and find_spec("fla") is None:
        return "the package flash-linear-attention is not installed"
    return reason


ATTENTION = per_pair(lambda size: size.key + size.value)

OTHER_ENGINES = {
    "flash_attn_2": "flash-attn 2",
    "flash_attn_3": "flash-attn 3",
    "flash_attn_4": "flash-attn 4",
    "triton": "our Triton kernels",
}


def _attention(
    label: str,
    call: Callable[[Inputs], Outputs],
    lacks: Callable[[torch.device], str | None],
    engine: str,
) -> Baseline:
    return Baseline(f"attention: {label}", attention_inputs, call, ATTENTION, lacks, engine)


def _standard_attention() -> list[Baseline]:
    found = [_attention("torch's choice", _torchs([]), lambda device: None, "sdpa")]
    for name, backend in SDPA.items():
        found.append(_attention(f"SDPA {name}", _torchs([backend]), needs_gpu, name))
    for name, label in OTHER_ENGINES.items():
        found.append(_attention(label, _by_engine(name), ENGINES[name].lacks, name))
    return found


STANDARD_ATTENTION = {baseline.name: baseline for baseline in _standard_attention()}


# --- flash-linear-attention ---------------------------------------------------------------------


def decaying_inputs(draw: Draw, size: Size) -> Inputs:
    """Return q, k, v and a log-decay per head and token, the inputs of gated linear attention."""
    return {
        **attention_inputs(draw, size),
        "log_decay": draw.steps(size, lambda x: logsigmoid(x + 4)),
    }


def _fla_simple_gla(inputs: Inputs) -> Outputs:
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g = (inputs[name].transpose(1, 2) for name in ("q", "k", "v", "log_decay"))
    return (chunk_simple_gla(q, k, v, g=g.float(), scale=1.0)[0],)


def scan_inputs(draw: Draw, size: Size) -> Inputs:
    """Return log-decays a <= 0 and x, both float32 [batch, tokens, heads * value].

    These are the conditioner's channels in fla's layout.
    """
    shape = (size.batch, size.tokens, size.heads * size.value)
    return {
        "a": draw.normal(*shape, change=logsigmoid, wide=True),
        "x": draw.normal(*shape, wide=True),
    }


def _fla_hgrn(inputs: Inputs) -> Outputs:
    from fla.ops.hgrn import chunk_hgrn

    return (chunk_hgrn(inputs["x"], inputs["a"])[0],)


FLA_GLA, FLA_HGRN = "fla: chunk_simple_gla", "fla: chunk_hgrn"
LINEAR = {
    FLA_GLA: Baseline(
        FLA_GLA,
        decaying_inputs,
        _fla_simple_gla,
        per_token(lambda size: 2 * size.key * size.value),
        needs_fla,
    ),
    FLA_HGRN: Baseline(FLA_HGRN, scan_inputs, _fla_hgrn, lacks=needs_fla),
}
