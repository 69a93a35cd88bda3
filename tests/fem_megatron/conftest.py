"""Fixtures of this package's tests: one process with Megatron's groups, and the numbers in the
fixture files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.one_process import megatron_of_one_process

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with megatron_of_one_process():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch, so that random numbers without a generator do not depend on the order of
    tests.
    """
    torch.manual_seed(0)


def load_fixture(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata of a fixture and its arrays."""
    with np.load(FIXTURES / f"{name}.npz") as file:
        return json.loads(str(file["meta"])), {
            key: torch.from_numpy(file[key]) for key in file.files if key != "meta"
        }


def drawn(layer: Any, spread: float = 0.3) -> Any:
    """Return the layer with random weights around their initial constants, so that none is
    trivial.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            constant = weight.spec.init if isinstance(weight.spec.init, int | float) else 0.0
            weight.copy_(
                constant
                + spread * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            )
    return layer


def tokens(
    length: int, b: int = 2, hidden: int = 16, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    """Return a random stream of tokens, [length, b, hidden]."""
    return torch.randn(
        length, b, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)
