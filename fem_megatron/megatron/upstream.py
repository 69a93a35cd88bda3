"""Supported versions of Megatron-core, and every patch of it.

Every patch documents its reason and the upstream lines that require it, with their release, and is
applied only to the releases that need it. Line numbers are those of 0.16.1 where no release is
named. This is the only file that compares versions of Megatron-core. On CUDA only three patches are
applied: the reader of checkpoints, the gradient's norm, and (since 0.19) the keys of parameter
groups.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fem_common.errors import UserError
from fem_megatron.megatron.platform import has_cuda

# Supported releases: OLDEST <= version < TOO_NEW.
OLDEST = "0.16.1"
TOO_NEW = "0.20"
REMEDY = f"pip install 'megatron-core>={OLDEST},<{TOO_NEW}'"

# Modules of megatron.core in use whose code names CUDA devices explicitly:
# `torch.empty(..., device=torch.cuda.current_device())`, `torch.zeros(..., device="cuda")`,
# `torch.cuda.synchronize()`. Only the *name* `torch` in these modules is replaced.
PATCHED_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.fully_parallel",
    "distributed.distributed_data_parallel",
    "distributed.finalize_model_grads",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.language_module.language_module",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "pipeline_parallel.utils",
    "tensor_parallel.data",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "transformer.module",
    "transformer.transformer_block",
    "transformer.transformer_layer",
    "transformer.utils",
    "utils",
)

# Keys by which releases before 0.19 identify a parameter group (optimizer/optimizer.py:96).
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")

_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
)


def installed() -> str:
    """Return the version of the Megatron-core that is imported, without its local part.

    Since 0.18 the local part is the commit of any git checkout that contains the package
    (package_info.py:21, 0.19.2), such as this one with an environment in it.
    """
    import megatron.core

    return str(megatron.core.__version__).partition("+")[0]


def is_supported(version: str) -> bool:
    """Return True if this code supports a version of Megatron-core.

    A release candidate counts as its release.
    """
    return _release(OLDEST) <= _release(version) < _release(TOO_NEW)


def since(release: str) -> bool:
    """Return True if the imported Megatron-core is ``release`` or newer."""
    return _release(installed()) >= _release(release)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the bits of a training step."""
    return {"torch": torch.__version__, "megatron-core": installed()}


def import_megatron() -> None:
    """Import Megatron-core without its warnings; without CUDA this also halves the import time.

    Call it before any other import of Megatron. It silences warnings of Megatron and torch about
    things that this code already handles: no TE, no apex, renamed collectives.

    Raises:
        UserError: the release is not supported. Its modules may lack what this code imports.
    """
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with contextlib.nullcontext() if has_cuda() else _without_compiler_and_loggers():
        importlib.import_module("megatron.core")
    _refuse_unsupported()


def _refuse_unsupported() -> None:
    found = installed()
    if not is_supported(found):
        raise UserError(
            f"megatron-core {found} is installed, but this code supports {OLDEST} or newer, below "
            f"{TOO_NEW}: {REMEDY}"
        )


@contextlib.contextmanager
def _without_compiler_and_loggers() -> Iterator[None]:
    """Disable ``torch.compile`` as a decorator, and hide wandb and TensorBoard, within the context.

    Upstream (jit.py:21, 0.16.1) decorates its fusions for CUDA, and the decorator imports torch's
    compiler: three seconds in every process. inference/contexts/dynamic_context.py:70 and
    timers.py:13 import the loggers, if installed, for inference and for timers that are not used.
    """
    compiler = torch.compile
    absent = [name for name in ("wandb", "tensorboard") if name not in sys.modules]
    torch.compile = lambda function: function  # type: ignore[assignment]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]


def read_checkpoints_with(reader: type) -> None:
    """Set the subclass of torch's FileSystemReader that Megatron uses.

    Call it before ``dist_checkpointing.load``. Upstream (strategies/torch.py:758 and 760,
    0.16.1; only :921 in 0.19.2, since 0.17) uses fixed classes, which unpickle arbitrary objects
    and compare no checksums.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    strategies.FileSystemReader = reader
    if not since("0.17"):
        strategies.CachedMetadataFileSystemReader = reader


def restore_linear(original: Callable[..., torch.Tensor]) -> None:
    """Undo the replacement of ``torch.nn.functional.linear`` by another library."""
    torch.nn.functional.linear = original


def prepare() -> str:
    """Make Megatron-core usable on this machine and return the collective backend.

    Call it once, before any Megatron object is created.

    Raises:
        UserError: the imported Megatron-core is not supported.
    """
    _refuse_unsupported()
    if since("0.19"):
        _identify_groups_without_rates()
    if has_cuda():
        _keep_norm_on_device()
        return "nccl"
    _install_cpu_shim()
    return "gloo"


class _TorchProxy(types.ModuleType):
    """``torch`` for a patched Megatron-core module, in which CUDA names mean the CPU."""

    def __init__(self, overrides: dict[str, Any]):
        super().__init__("torch")
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cuda_stand_in() -> types.ModuleType:
    """Return ``torch.cuda`` for patched modules.

    The current device is the CPU, and streams never wait.
    """
    cuda = _TorchProxy({})
    cuda.__dict__.update(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        is_available=lambda: False,
    )
    if since("0.19"):
        # param_and_grad_buffer.py:632, 0.19.2, takes the current stream to wait for replays of
        # graphs, of which there are none.
        cuda.__dict__["current_stream"] = lambda *_: None
    cuda.__class__ = _CudaProxy
    return cuda


class _CudaProxy(_TorchProxy):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@contextlib.contextmanager
def _tensor_types_named_cuda() -> Iterator[None]:
    """Report CUDA type names for CPU tensors within the context.

    Megatron's optimizers accept parameters by the name of their CUDA type (optimizer.py:671-699,
    distrib_optimizer.py:361-435, clip_grads.py:167).
    """
    real = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None and not kwargs:
            return real(self).replace("torch.", "torch.cuda.", 1)
        return real(self, dtype, **kwargs)

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _within_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _tensor_types_named_cuda():
            return function(*args, **kwargs)

    return call


def _install_cpu_shim() -> None:
    """Patch the listed modules to run on the CPU. Idempotent: an installed proxy is detected."""
    core = {name: importlib.import_module(f"megatron.core.{name}") for name in PATCHED_MODULES}
    if any(isinstance(module.torch, _TorchProxy) for module in core.values()):
        return
    # Megatron was imported without `import_megatron`: its fusions would start a C++ build.
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    proxy = _TorchProxy(
        {"cuda": _cuda_stand_in(), **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}}
    )
    for module in core.values():
        module.torch = proxy  # type: ignore[attr-defined]
    # rope_utils.py:64 and language_module.py:244 call .cuda() on a tensor.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    random = core["tensor_parallel.random"]
    # random.py:41-112 read and write the CUDA generator through torch._C.
    random._get_cuda_rng_state = (  # type: ignore[attr-defined]
        lambda *_, **__: torch.get_rng_state()
    )
    random._set_cuda_rng_state = (  # type: ignore[attr-defined]
        lambda state, *_, **__: torch.set_rng_state(state)
    )
    float16 = core["optimizer.optimizer"].Float16OptimizerWithFloat16Params
    float16.__init__ = _within_cuda_names(float16.__init__)
    distributed = core["optimizer.distrib_optimizer"].DistributedOptimizer
    distributed.__init__ = _within_cuda_names(distributed.__init__)
    clip = _within_cuda_names(core["optimizer.clip_grads"].clip_grad_by_total_norm_fp32)
    core["optimizer.clip_grads"].clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]
    core["optimizer.optimizer"].clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]
    # utils.py:1205 sums squares with torch.norm. On the CPU its error is up to 2e-5 for a large
    # fp32 tensor in which few rows contribute most of the norm (an embedding's gradient). The
    # gradient norm, and therefore the clipping, would depend on how the tensor is split.
    core["optimizer.clip_grads"].l2_norm_impl = _l2_norm  # type: ignore[attr-defined]
    core["optimizer.clip_grads"].multi_tensor_scale_impl = _scale  # type: ignore[attr-defined]
    buffers = core["distributed.param_and_grad_buffer"]
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _not_alone(getattr(buffers, name)))


def _identify_groups_without_rates() -> None:
    """Match the parameter groups of a checkpoint by the same keys as releases before 0.19.

    Since 0.19 the keys include a group's learning rates and weight decay (optimizer/optimizer.py:96
    and 634, 0.19.2). A run that resumes with another learning rate would not find its groups.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    for module in (optimizer, distrib_optimizer, base):
        module.param_group_identifier_keys = _GROUP_KEYS


def gradients_for_norm(optimizer: Any) -> list[torch.Tensor]:
    """Return the gradients of one Megatron optimizer that count towards the norm on this rank.

    0.19 renamed the method (optimizer/optimizer.py:136, 0.16.1; :280, 0.19.2).
    """
    method = "get_grads_for_grad_norm" if since("0.19") else "get_main_grads_for_grad_norm"
    gradients: list[torch.Tensor] = getattr(optimizer, method)()
    return gradients


def _not_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective of a bucket's buffer, without its call in a group of one rank.

    The rank's share is a view of the entire buffer (param_and_grad_buffer.py:56, 0.16.1), so that
    nothing would change, but gloo copies the buffer twice. The handle of an asynchronous call is
    awaited later, so that call stays.
    """

    def call(output: torch.Tensor, given: torch.Tensor, **settings: Any) -> Any:
        alone = settings["group"].size() == 1 and output.data_ptr() == given.data_ptr()
        if alone and not settings["async_op"]:
            return None
        return collective(output, given, **settings)

    return call


def _keep_norm_on_device() -> None:
    """Replace upstream's norm and scaling of gradients where neither is a fused kernel.

    Without Transformer Engine and apex, upstream's norm copies a number per tensor to the host
    (utils.py:1205-1207, 0.16.1), and its scaling makes and copies a temporary per tensor
    (utils.py:1217).
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _scale(
    _chunk_size: int, _flag: Any, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Multiply the tensors of the first list, which is also the second, in place."""
    torch._foreach_mul_(tensor_lists[0], scale)


def _l2_norm(
    _chunk_size: int, _flag: Any, tensor_lists: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the Euclidean norm of all tensors together.

    Each part is computed in its own precision, and the sum over parts in float64. A part is a
    tensor on a GPU, which adds in a tree, and a block of a tensor on a CPU.
    """
    if tensor_lists[0][0].is_cuda:
        return torch.stack(torch._foreach_norm(tensor_lists[0])).double().norm().float().view(
            1
        ), None
    parts = []
    for tensor in tensor_lists[0]:
        flat = tensor.reshape(-1)
        full = flat.numel() // 1024 * 1024
        parts += [
            torch.linalg.vector_norm(blocks, dim=1)
            for blocks in (flat[:full].view(-1, 1024), flat[None, full:])
            if blocks.numel()
        ]
    return torch.cat(parts).double().norm().float().view(1), None
