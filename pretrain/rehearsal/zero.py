"""Run DeepSpeed's ZeRO in a rehearsal, on meta tensors.

DeepSpeed's own set-up and step are used; this module sets the holders of its tensors. It contains
every replacement of a DeepSpeed function, each with its reason and its location upstream (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from fem_common.costs import GRADIENTS, OPTIMIZER, WEIGHTS, WORKSPACE
from fem_common.errors import ConfigError
from fem_megatron.megatron import platform
from pretrain.config import RunConfig
from pretrain.engines.deepspeed_ops import check_ops, prepare_environment
from pretrain.rehearsal.record import FORWARD, REDUCTION, UPDATE, Recorder


def prepare(config: RunConfig) -> None:
    """Import DeepSpeed before another device is simulated.

    The import detects the device of this machine.

    Raises:
        ConfigError: DeepSpeed is not installed, or the run uses offloading or Muon.
    """
    if config.engine.offload_optimizer:  # set with every kind of offload
        raise ConfigError(
            "engine.offload_optimizer = true cannot be rehearsed: DeepSpeed's update on the host "
            "reads tensors by their address; set it to false (--plan estimates its memory)"
        )
    if config.optimizer.name == "muon":
        raise ConfigError(
            "optimizer.name = muon cannot be rehearsed under engine.name=deepspeed: each rank "
            "sends its updates to other ranks, which a rehearsal does not have; set "
            "optimizer.name=adamw, or engine.name=megatron"
        )
    if obstacle := check_ops(offload_optimizer=False):
        raise ConfigError(f"engine.name = deepspeed: {obstacle}")
    prepare_environment()
    from deepspeed.accelerator import get_accelerator

    get_accelerator()


@contextmanager
def on_fake_machine() -> Iterator[None]:
    """Make DeepSpeed work within `fem_megatron.meta.fake_machine.machine` during the block.

    DeepSpeed's process-wide state is restored at the end.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import utils
    from deepspeed.utils import groups

    with ExitStack() as stack:
        stack.callback(set_accelerator, get_accelerator())
        if platform.has_cuda():
            set_accelerator(_gpu())
        # The default group and its clone (comm/comm.py:44, utils/groups.py:46) belong to a process,
        # not to an engine.
        stack.enter_context(mock.patch.object(deepspeed.comm.comm, "cdb", None))
        stack.enter_context(mock.patch.multiple(groups, _WORLD_GROUP=None, mpu=None))
        # The check for compilable operations (ops/__init__.py:27) starts compilers, and a rehearsal
        # runs none of these operations.
        stack.enter_context(mock.patch.dict(vars(deepspeed.ops), {"__compatible_ops__": {}}))
        # This function always prints the process's memory (bf16_optimizer.py:54).
        stack.enter_context(mock.patch.object(bf16_optimizer, "see_memory_usage"))
        stack.enter_context(mock.patch.multiple(utils, **_alike(utils)))
        yield


def _gpu() -> Any:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    class Gpu(CUDA_Accelerator):
        """CUDA accelerator without profiler ranges.

        A torch without CUDA lacks these ranges (cuda_accelerator.py:248).
        """

        range_push = range_pop = lambda *_, **__: None

    return Gpu()


def _alike(utils: Any) -> dict[str, Any]:
    """Return name -> replacement of the functions by which ZeRO-3 compares ranks.

    The originals compare the order of the modules with rank 0 (zero/utils.py:81 and 99). The
    replacements send and read like the originals, but always report equality.
    """
    length, numbers = utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0

    def same_length(given: list[int]) -> None:
        with suppress(RuntimeError):
            length(given)

    def same_numbers(given: list[int]) -> list[int]:
        numbers(given)
        return given

    return {"assert_lst_len_same_as_other_ranks": same_length, "get_lst_from_rank0": same_numbers}


def follow(engine: Any, recorder: Recorder) -> None:
    """Set the recorder's phases of the engine's steps and the holders of DeepSpeed's tensors."""
    trace, inner = recorder.trace, engine.engine
    reduce, update = inner.allreduce_gradients, inner._take_model_step

    def reduced(*args: Any, **kwargs: Any) -> None:
        trace.stage = REDUCTION
        reduce(*args, **kwargs)
        trace.stage = FORWARD
        set_holders(engine, recorder)

    def updated(*args: Any, **kwargs: Any) -> None:
        trace.stage = UPDATE
        update(*args, **kwargs)

    inner.allreduce_gradients, inner._take_model_step = reduced, updated
    # DeepSpeed stores shapes as meta tensors (zero/stage_1_and_2.py:485), which a rehearsal would
    # count as memory.
    recorder.forget(getattr(inner.optimizer, "round_robin_bit16_meta", []))
    for parameter in engine.model.parameters():
        parameter.register_post_accumulate_grad_hook(_gradient_hook(engine, recorder))
    engine.state.adam.register_step_pre_hook(lambda *_: set_holders(engine, recorder))
    set_holders(engine, recorder)


def _gradient_hook(engine: Any, recorder: Recorder) -> Callable[[Any], None]:
    """Return a hook for a parameter, called when its gradient exists, that sets the holders.

    DeepSpeed's own hook has run before it and may have moved the gradient into a bucket.
    """

    def hook(parameter: Any) -> None:
        recorder.known(_buckets(engine.engine.optimizer), WORKSPACE)
        recorder.known([parameter.grad, getattr(parameter, "grad_accum", None)], GRADIENTS)

    return hook


def _buckets(optimizer: Any) -> list[Any]:
    return [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]


def set_holders(engine: Any, recorder: Recorder) -> None:
    """Set the holders of the memory that exists now.

    Only the first holder set for a tensor counts: in stage 0 the optimizer updates the weights
    directly.
    """
    optimizer = engine.engine.optimizer
    parameters = list(engine.model.parameters())
    flat = engine.state.flat()
    recorder.known(_buckets(optimizer), WORKSPACE)
    recorder.known(
        [getattr(parameter, "ds_tensor", parameter) for parameter in parameters], WEIGHTS
    )
    recorder.known([flat, [dict(state) for state in engine.state.adam.state.values()]], OPTIMIZER)
    recorder.known([each.grad for each in [*flat, *parameters]], GRADIENTS)
    names = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
    recorder.known([getattr(optimizer, name, None) for name in names], GRADIENTS)
    recorder.known([getattr(parameter, "grad_accum", None) for parameter in parameters], GRADIENTS)
