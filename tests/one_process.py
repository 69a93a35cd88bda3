"""Create Megatron-core's process groups for tests that build its models in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fem_megatron.megatron import platform, upstream


@contextmanager
def megatron_of_one_process() -> Iterator[None]:
    upstream.import_megatron()
    platform.initialize_distributed()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
