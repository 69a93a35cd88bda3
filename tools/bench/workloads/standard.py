"""What ours is held against: standard attention by each engine that a machine may have, and flash-linear-attention's kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from kernels.fem_attention.engines import ENGINES, Reading
from tools.bench.workloads.base import Baseline, Draw, Inputs, Outputs, Size, no_products, per_pair, per_token

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_inputs(draw: Draw, size: Size) -> Inputs:
    """q, k, v of standard attention."""
    return {"q": draw.heads(size, size.key), "k": draw.heads(size, size.key), "v": draw.heads(size, size.value)}


def _sdpa(backends: list[SDPBackend]) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        with sdpa_kernel(backends):
            return (scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True),)

    return call


def _whatever_torch_takes(inputs: Inputs) -> Outputs:
    return (scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True),)


def _by_engine(name: str) -> Callable[[Inputs], Outputs]:
    """Plain attention by an engine of ``kernels.fem_attention`` that torch's scaled_dot_product_attention cannot be asked for."""

    def call(inputs: Inputs) -> Outputs:
        q, k, v = (inputs[part] for part in ("q", "k", "v"))
        return (ENGINES[name].attend(q, k, v, Reading(causal=True, scale=q.shape[-1] ** -0.5)),)

    return call


def needs_gpu(device: torch.device) -> str | None:
    """Why a kernel for GPUs cannot run on ``device``."""
    return None if device.type != "cpu" else "no GPU"


def needs_fla(device: torch.device) -> str | None:
    """Why flash-linear-attention's kernels cannot run on ``device``."""
    return needs_gpu(device) or (None if find_spec("fla") is not None else "the package flash-linear-attention is not installed")


ATTENTION = per_pair(lambda size: size.key + size.value)

OTHER_ENGINES = {"flash_attn_2": "flash-attn 2", "flash_attn_3": "flash-attn 3", "triton": "our Triton kernels"}


def _attention(label: str, call: Callable[[Inputs], Outputs], lacks: Callable[[torch.device], str | None], engine: str) -> Baseline:
    return Baseline(f"attention: {label}", attention_inputs, call, ATTENTION, lacks, engine)


STANDARD_ATTENTION = {
    baseline.name: baseline
    for baseline in (
        _attention("torch's choice", _whatever_torch_takes, lambda device: None, "sdpa"),
        *(_attention(f"SDPA {name}", _sdpa([backend]), needs_gpu, name) for name, backend in SDPA.items()),
        *(_attention(label, _by_engine(name), ENGINES[name].lacks, name) for name, label in OTHER_ENGINES.items()),
    )
}


# --- flash-linear-attention -----------------------------------------------------------------------------------------------------


def decaying_inputs(draw: Draw, size: Size) -> Inputs:
    """q, k, v and a log-decay a head, as gated linear attention has them."""
    return {
        **attention_inputs(draw, size),
        "log_decay": draw.steps(size, lambda x: logsigmoid(x + 4)),
    }


def _fla_simple_gla(inputs: Inputs) -> Outputs:
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g = (inputs[name].transpose(1, 2) for name in ("q", "k", "v", "log_decay"))
    return (chunk_simple_gla(q, k, v, g=g.float(), scale=1.0)[0],)


def scan_inputs(draw: Draw, size: Size) -> Inputs:
    """Log-decays a <= 0 and x [batch, tokens, heads * value], float32: the conditioner's channels as fla lays them out."""
    shape = (size.batch, size.tokens, size.heads * size.value)
    return {"a": draw.normal(*shape, change=logsigmoid, wide=True), "x": draw.normal(*shape, wide=True)}


def _fla_hgrn(inputs: Inputs) -> Outputs:
    from fla.ops.hgrn import chunk_hgrn

    return (chunk_hgrn(inputs["x"], inputs["a"])[0],)


LINEAR = {
    "fla: chunk_simple_gla": Baseline(
        "fla: chunk_simple_gla", decaying_inputs, _fla_simple_gla, per_token(lambda size: 2 * size.key * size.value), needs_fla
    ),
    "fla: chunk_hgrn": Baseline("fla: chunk_hgrn", scan_inputs, _fla_hgrn, no_products, needs_fla),
}
