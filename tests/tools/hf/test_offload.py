"""Models whose weights are on the CPU or the disk until they are used, by accelerate's hooks, give
the same numbers as without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from tests.tools.hf.small import GREEDY, MIXERS, Exports, here, padded_batch, slow_but


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a padded batch."""
    ids, mask = padded_batch()
    with torch.no_grad():
        found: torch.Tensor = model(ids, attention_mask=mask).logits
    return found


@pytest.mark.parametrize("name", slow_but(*MIXERS))
def test_weights_offloaded_to_the_cpu(name: str) -> None:
    """Every weight is on the meta device except during its module's forward, in this test with the
    CPU as the computing device.
    """
    model = here(name)
    wanted = logits(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), wanted)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["hybrid", pytest.param("cem", marks=pytest.mark.slow)])
def test_a_device_map_with_layers_on_the_disk(
    exported: Exports, open_folder: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    given = exported(name)
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    model = open_folder(given.folder, device_map=places, offload_folder=tmp_path)
    assert all(parameter.is_meta for parameter in model.model.layers[1].parameters())
    ids, mask = padded_batch()
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 3}
    generated = [each.generate(ids, **options) for each in (model, given.model)]
    assert torch.equal(logits(model), logits(given.model)) and torch.equal(*generated)
