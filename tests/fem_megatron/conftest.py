"""One process with Megatron's groups, for every file of tests of this room; and the fixtures' numbers."""

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
    """What a test draws without a generator is the same in any order."""
    torch.manual_seed(0)


def load_fixture(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a fixture says of itself, and its arrays."""
    with np.load(FIXTURES / f"{name}.npz") as file:
        return json.loads(str(file["meta"])), {
            key: torch.from_numpy(file[key]) for key in file.files if key != "meta"
        }


def drawn(layer: Any, spread: float = 0.3) -> Any:
    """The layer with every weight drawn anew around the constant that it starts from, so that none is trivial."""
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
    """A stream of so many tokens, [length, b, hidden]."""
    return torch.randn(
        length, b, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)
