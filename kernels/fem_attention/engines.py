"""Attention engines for the free-energy read: their limits, and functions that call them.

The read is ordinary softmax attention over the values [v | U], where U is derived from v
(`kernels.free_energy`). `kernels.fem_attention` chooses the engine of each call. Only public
functions are called: torch's scaled_dot_product_attention with one backend, the packages of
FlashAttention-2, -3 and -4, and this package's own Triton kernels. An engine that requires queries
and values of equal width gets padded tensors, or reads v and U in two calls. Two calls cost the
same products where d_v = d_k, and also work where 2 d_v exceeds the engine's width limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import machine
from kernels.fem_attention.reference import Reading as Reading
from kernels.fem_attention.reference import repeat_heads
from kernels.implementations import lacks_triton


@dataclass(frozen=True)
class Call:
    """Properties of a call that determine which engines can take it.

    ``values``: number of channels of the values: 2 dv for [v | U], or dv for a read without a free
    energy.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    tq: int
    tk: int
    dk: int
    values: int
    causal: bool
    positive: bool  # scale >= 0
    padding: bool  # keys_valid is given
    documents: bool  # cu_seqlens is given
    trains: bool  # gradients are needed
    cudnn: bool = True  # cuDNN may be used

    @property
    def masked(self) -> bool:
        """True if an explicit mask is needed, rather than causality alone or no mask."""
        return self.padding or self.documents or (self.causal and 1 < self.tq < self.tk)


@dataclass(frozen=True)
class Plan:
    """Division of a call's value channels into parts, one call of the engine for each.

    parts: the number of parts, read one after the other.
    equal: True if queries, keys and values are padded to one width.
    """

    parts: int
    equal: bool

    def widths(self, dk: int, values: int) -> tuple[int, int]:
        """Return (width of queries and keys, width of values) of each call."""
        part = -(-values // self.parts)
        return (max(dk, part),) * 2 if self.equal else (dk, part)


Attend = Callable[[Tensor, Tensor, Tensor, Reading], Tensor]


@dataclass(frozen=True)
class Engine:
    """Implementation of attention, with gradients.

    It computes softmax(scale q k^T) values [b, h, tq, n] for values [b, hk, tk, n].

    lacks(device): the reason why this machine cannot run the engine, or None.
    refuses(call): the reason why the engine cannot take a call of this kind, or None.
    fits(call, widths): True if the engine takes these widths (queries and keys, values).
    attend(q, k, values, reading): compute the attention, at widths that fit.
    equal: True if the engine prefers queries and values of equal width.
    """

    name: str
    what: str
    lacks: Callable[[torch.device], str | None]
    attend: Attend
    fits: Callable[[Call, tuple[int, int]], bool] = lambda call, widths: True
    refuses: Callable[[Call], str | None] = lambda call: None
    equal: bool = False

    def plan(self, call: Call) -> Plan | None:
        """Return the first division of the values that fits, in order of preference, or None."""
        ways = [Plan(1, self.equal), Plan(2, self.equal), Plan(1, True), Plan(2, True)]
        if self.equal and call.values >= 2 * call.dk:
            ways = [Plan(2, True), Plan(1, True)]
        return next(
            (way for way in ways if self.fits(call, way.widths(call.dk, call.values))), None
        )

    def unfit(self, call: Call) -> str | None:
        """Return the reason why the engine cannot take this call, or None."""
        if call.dtype not in (torch.float32, torch.bfloat16):
            return str(call.dtype).removeprefix("torch.")
        if not call.positive:
            return "a negative scale"
        if (reason := self.refuses(call)) is not None:
            return reason
        return (
            None
            if self.plan(call) is not None
            else f"widths {call.dk} and {call.values} in {str(call.dtype).removeprefix('torch.')}"
        )

    def read(self, q: Tensor, k: Tensor, values: Tensor, reading: Reading, call: Call) -> Tensor:
        """Return softmax(scale q k^T) values [b, h, tq, n].

        Pads the tensors, or reads the values in parts, if the engine requires it. ``call`` must
        describe these arguments, and ``unfit(call)`` must be None.
        """
        way = self.plan(call)
        assert way is not None
        dk, part = way.widths(call.dk, call.values)
        q, k = (F.pad(_rows(t), (0, dk - call.dk)) if dk > call.dk else _rows(t) for t in (q, k))
        reads = []
        # A single part is not split, because the gradient of a split is a copy.
        for piece in (values,) if way.parts == 1 else values.split(part, dim=-1):
            width = piece.shape[-1]
            reads.append(
                self.attend(
                    q, k, F.pad(piece, (0, part - width)) if part > width else piece, reading
                )[..., :width]
            )
        return reads[0] if len(reads) == 1 else torch.cat(reads, dim=-1)


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


# --- torch's scaled_dot_product_attention ---------------------------------------------------------


def _sdpa(backend: SDPBackend | None, groups: bool) -> Attend:
    """Return a function that calls torch's attention with one backend (None: torch chooses).

    groups: True if the backend supports fewer kv heads than query heads; otherwise kv heads are
    repeated.
    """

    def attend(q: Tensor, k: Tensor, values: Tensor, reading: Reading) -> Tensor:
        (heads, tq), tk, mask = q.shape[1:3], k.shape[2], reading.mask(q, k)
        if not groups:
            k, values = repeat_heads(k, 1, heads), repeat_heads(values, 1, heads)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            is_causal = reading.causal and mask is None and tq == tk
            grouped = {"enable_gqa": heads != k.shape[1]}
            return F.scaled_dot_product_attention(
                q, k, values, attn_mask=mask, is_causal=is_causal, scale=reading.scale, **grouped
            )

    return attend


_TAKES = {
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
}


@functools.lru_cache(maxsize=4096)
def _torch_takes(
    backend: SDPBackend, groups: bool, call: Call, widths: tuple[int, int], deterministic: int
) -> bool:
    """Return True if torch's backend accepts a call with these widths.

    torch is queried with at most 64 tokens, because it checks lengths only for equality and for 1.
    deterministic: torch's debug mode, in which some backends are not available; it is an argument
    so that it is part of the cache key. machine.FAKE_GPU is not a real device, so torch cannot
    check it; the result for it is that of an H100.
    """
    if call.device == machine.FAKE_GPU:
        return (
            not call.masked
            and call.dtype == torch.bfloat16
            and max(widths) <= 128
            and not any(width % 8 for width in widths)
        )
    tk = min(call.tk, 64)
    tq = tk if call.tq == call.tk else min(call.tq, max(1, tk - 1))
    kv_heads = call.kv_heads if groups else call.heads

    def given(heads: int, tokens: int, width: int) -> Tensor:
        return torch.empty(
            call.batch,
            heads,
            tokens,
            width,
            dtype=call.dtype,
            device=call.device,
            requires_grad=call.trains,
        )

    mask = torch.empty(1, 1, tq, tk, dtype=torch.bool, device=call.device) if call.masked else None
    with torch.set_grad_enabled(call.trains), sdpa_kernel(backend):
        tensors = (
            given(call.heads, tq, widths[0]),
            given(kv_heads, tk, widths[0]),
            given(kv_heads, tk, widths[1]),
            mask,
        )
        params = SDPAParams(
            *tensors, 0.0, call.causal and mask is None and tq == tk, kv_heads != call.heads
        )
        return bool(_TAKES[backend](params, debug=False))


# --- the packages of FlashAttention ---------------------------------------------------------------


def _flash_package(package: str) -> Attend:
    """Return a function that calls FlashAttention-2 (``flash_attn``), -3 (``flash_attn_interface``)
    or -4 (``flash_attn.cute``).

    Documents are read by the package's variable-length function.
    """

    def attend(q: Tensor, k: Tensor, values: Tensor, reading: Reading) -> Tensor:
        functions = import_module(package)
        kinds = {
            "softmax_scale": reading.scale,
            "causal": reading.causal,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        q, k, values = (t.transpose(1, 2) for t in (q, k, values))
        if reading.cu_seqlens is None:
            out = functions.flash_attn_func(q, k, values, **kinds)
        else:
            # The token count is an upper bound of the longest document; the host would have to wait
            # for the exact length.
            starts, longest = reading.cu_seqlens.int(), q.shape[1]
            lengths = {
                "cu_seqlens_q": starts,
                "cu_seqlens_k": starts,
                "max_seqlen_q": longest,
                "max_seqlen_k": longest,
            }
            out = functions.flash_attn_varlen_func(q[0], k[0], values[0], **lengths, **kinds)
            out = (out[0] if isinstance(out, tuple) else out)[None]
        # FlashAttention-4 and early versions of -3 return (output, log-sum-exp).
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _lacks_package(
    package: str, distribution: str, oldest: int, newest: int
) -> Callable[[torch.device], str | None]:
    """Return a function that reports why a device cannot use the package, or None.

    The package must be installed, and the device's architecture (90 for sm_90) must be between
    ``oldest`` and ``newest``.
    """

    @functools.cache
    def broken() -> str | None:
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            return f"the package {distribution} is not installed"
        try:
            module = import_module(package)
        except Exception as error:  # a package built for another torch may raise anything
            return f"the package {distribution} cannot be imported ({type(error).__name__})"
        return (
            None
            if hasattr(module, "flash_attn_func")
            else f"the package {distribution} has no flash_attn_func"
        )

    def lacks(device: torch.device) -> str | None:
        if (reason := _lacks_gpu(device) or broken()) is not None:
            return reason
        found = machine.architecture(device)
        return None if oldest <= found <= newest else f"it is not made for sm_{found}"

    return lacks


def _lacks_gpu(device: torch.device) -> str | None:
    """Return the reason why a device cannot run GPU attention and Triton kernels, or None."""
    if device.type != "cuda":
        return "no GPU" if device.type == "cpu" else f"no kernels for {device.type}"
    return lacks_triton(device)


# --- calls that an engine refuses -----------------------------------------------------------------


def _refuses_new_shapes(call: Call) -> str | None:
    """Return the reason why cuDNN does not take a call, or None.

    cuDNN compiles a plan for every new shape, so it is not used if shapes change between calls.
    Several versions return NaN gradients at lengths that are not multiples of 128.
    """
    if not call.cudnn:
        return (
            "shapes that change from call to call, or torch.backends.cuda.enable_cudnn_sdp(False)"
        )
    return "lengths that are no multiples of 128" if call.tq % 128 or call.tk % 128 else None


def _refuses_masks(call: Call) -> str | None:
    if call.padding or call.documents:
        return "padding" if call.padding else "documents"
    return "queries after a past" if call.masked else None


def _refuses_padding(call: Call) -> str | None:
    if call.dtype != torch.bfloat16:
        return str(call.dtype).removeprefix("torch.")
    return "padding" if call.padding else None


def _refuses_spilling(call: Call) -> str | None:
    """Return the reason why the Triton kernels do not take a call, or None.

    At some head widths the gradient kernels would spill registers on sm_90.
    """
    if (
        call.device.type == "cpu"
        or not call.trains
        or (call.dk <= 128 and (call.dk <= 64 or call.dk % 2 == 0))
    ):
        return None
    nearest = "128 do" if call.dk > 128 else f"{call.dk - 1} and {call.dk + 1} do"
    return f"gradients of queries {call.dk} wide spill registers on a GPU, of {nearest} not"


def _triton(q: Tensor, k: Tensor, values: Tensor, reading: Reading) -> Tensor:
    from kernels.fem_attention.triton.function import attend

    out: Tensor = attend(q, k, values, **reading.masks())
    return out


def _torch_engine(
    name: str, what: str, backend: SDPBackend, groups: bool = True, **more: Any
) -> Engine:
    def fits(call: Call, widths: tuple[int, int]) -> bool:
        return _torch_takes(backend, groups, call, widths, torch.get_deterministic_debug_mode())

    return Engine(name, what, _lacks_gpu, _sdpa(backend, groups), fits, **more)


def _package_engine(
    name: str,
    what: str,
    package: str,
    distribution: str,
    oldest: int,
    newest: int,
    widest: int = 256,
) -> Engine:
    lacks = _lacks_package(package, distribution, oldest, newest)
    return Engine(
        name,
        what,
        lacks,
        _flash_package(package),
        lambda call, widths: max(widths) <= widest,
        _refuses_padding,
        equal=True,
    )


_LISTED = (
    _torch_engine(
        "cudnn",
        "cuDNN's attention, through torch",
        SDPBackend.CUDNN_ATTENTION,
        refuses=_refuses_new_shapes,
    ),
    _package_engine(
        "flash_attn_3",
        "FlashAttention-3, the package flash_attn_interface",
        "flash_attn_interface",
        "flash_attn_interface",
        90,
        90,
    ),
    _package_engine(
        "flash_attn_4",
        "FlashAttention-4, the package flash_attn.cute",
        "flash_attn.cute",
        "flash-attn-4",
        90,
        119,
        128,
    ),
    _torch_engine(
        "flash",
        "FlashAttention-2, torch's own",
        SDPBackend.FLASH_ATTENTION,
        refuses=_refuses_masks,
        equal=True,
    ),
    _package_engine(
        "flash_attn_2",
        "FlashAttention-2, the package flash-attn",
        "flash_attn",
        "flash-attn",
        80,
        129,
    ),
    Engine(
        "triton",
        "this project's kernels",
        lacks_triton,
        _triton,
        lambda call, widths: (
            widths[0] <= 256
            and widths[1] <= (512 if call.device.type == "cpu" or not call.trains else 256)
        ),
        _refuses_spilling,
    ),
    _torch_engine(
        "efficient",
        "torch's memory-efficient attention",
        SDPBackend.EFFICIENT_ATTENTION,
        groups=False,
    ),
    Engine("sdpa", "the attention that torch selects", lacks_triton, _sdpa(None, True)),
)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _LISTED}
