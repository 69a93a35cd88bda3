"""Tests of writing a checkpoint's tensor files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from pretrain.checkpoint import tensors
from pretrain.checkpoint.folder import HashedFile
from pretrain.checkpoint.reader import read_part
from pretrain.checkpoint.tensors import in_background, on_host, result_of, write_tensor


def test_a_save_copies_the_gpu_s_tensors_and_leaves_the_host_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-ins for GPU tensors are not tensors: only `staged` may access them."""
    requested: list[Any] = []
    here = torch.ones(2)
    there: list[Any] = [SimpleNamespace(is_cuda=True) for _ in range(2)]

    def stand_in(on_gpu: list[Any]) -> list[torch.Tensor]:
        requested.extend(on_gpu)
        return [torch.full((3,), float(number)) for number in range(len(on_gpu))]

    monkeypatch.setattr(tensors, "staged", stand_in)
    a, b, c = (MetadataIndex(name) for name in "abc")
    copied = on_host({"f": [(a, there[0]), (b, here)], "g": [(c, there[1])]})
    assert requested == there
    assert [index for index, _ in copied["f"]] == [a, b]
    assert copied["f"][0][1].tolist() == [0.0] * 3
    assert copied["f"][1][1] is here
    assert [(index, tensor.tolist()) for index, tensor in copied["g"]] == [(c, [1.0] * 3)]


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda full: full[3:5], id="part"),
        pytest.param(lambda full: full.t(), id="transposed"),
        pytest.param(lambda full: full[:0], id="empty"),
        pytest.param(torch.nn.Parameter, id="parameter"),
    ],
)
def test_a_tensor_s_archive_contains_its_values_and_no_more(tmp_path: Path, view: Any) -> None:
    full = torch.arange(80_000.0).reshape(10, 8000)
    with HashedFile(tmp_path / "a.distcp") as file:
        file.write(b"before")
        place = write_tensor(file, view(full))
    assert (place.relative_path, place.offset) == ("a.distcp", 6)
    # An archive's headers and padding take about 1,200 bytes.
    assert place.length < view(full).nbytes + 2000
    with (tmp_path / "a.distcp").open("rb") as written:
        found = read_part(written, place)
    assert type(found) is torch.Tensor and torch.equal(found, view(full))


def test_a_process_without_a_result_is_reported() -> None:
    assert result_of(*in_background(lambda: 3)) == 3
    process, connection = in_background(lambda: os._exit(9))
    assert result_of(process, connection) == (
        "the process that writes its files ended with exit code 9"
    )
