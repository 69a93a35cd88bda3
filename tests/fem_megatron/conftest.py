"""One process with Megatron's groups, for every test of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fem_megatron import platform


@pytest.fixture(scope="package", autouse=True)
def one_process() -> Iterator[None]:
    platform.quiet_libraries()
    platform.initialize_distributed()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
