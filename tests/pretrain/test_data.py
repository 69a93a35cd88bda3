"""The order of samples: blends, position, and an index cache that never serves other data than it was made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.loader import load_run
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO


@pytest.fixture
def groups() -> Iterator[None]:
    from megatron.core import parallel_state

    from fem_megatron import platform

    platform.initialize_distributed()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build(settings: list[str], cache: Path, samples: int, content_key: str | None = None) -> Any:
    from pretrain.data import build_datasets

    prepared = prepare(load_run(DEMO, settings), 1)
    assert prepared.facts is not None
    return build_datasets(
        prepared.config,
        vocab_size=512,
        eod_id=prepared.facts.eod_id or 0,
        content_key=content_key or prepared.facts.content_key,
        train_samples=samples,
        default_cache=cache,
    )


@pytest.mark.usefixtures("groups")
def test_blend_takes_its_shares(settings: list[str], tiny_data: Path, tmp_path: Path) -> None:
    blend = f"data.train=[{{prefix: {tiny_data / 'train'}, weight: 3}}, {{prefix: {tiny_data / 'valid'}, weight: 1}}]"
    train = build([*settings, blend], tmp_path, 400).train
    taken = Counter(int(train.dataset_index[i]) for i in range(400))
    # Megatron fills the largest deficit first: shares are exact to one sample.
    assert abs(taken[0] - 300) <= 1
    assert abs(taken[1] - 100) <= 1


@pytest.mark.usefixtures("groups")
def test_position_is_exact(settings: list[str], tmp_path: Path) -> None:
    """Reading from sample 12 on is what reading from the start gives after 12 samples; no sample comes twice in a pass."""
    from pretrain.data import batches

    train = build(settings, tmp_path, 40).train
    whole, later = batches(train, 0, 2, torch.device("cpu")), batches(train, 12, 2, torch.device("cpu"))
    seen = [next(whole) for _ in range(6)]
    for _ in range(5):
        a, b = next(whole), next(later)
        assert a.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert torch.equal(a["tokens"][:, 1:], a["labels"][:, :-1])
        seen.append(a)
    texts = [tuple(row.tolist()) for batch in seen for row in batch["tokens"]]
    assert len(set(texts)) == len(texts)


@pytest.mark.usefixtures("groups")
def test_longer_request_keeps_the_order_within_a_pass(settings: list[str], tmp_path: Path) -> None:
    short, long = (build(settings, tmp_path, samples).train for samples in (40, 60))
    assert all(np.array_equal(short[i]["tokens"], long[i]["tokens"]) for i in range(40))


@pytest.mark.usefixtures("groups")
def test_index_cache_is_keyed_by_content_and_not_trusted_half_written(settings: list[str], tmp_path: Path) -> None:
    first = build(settings, tmp_path, 40, content_key="a").train[0]["tokens"]
    (folder,) = tmp_path.glob("????????????????????????????????")
    # An interrupted run: an index file cut short, and no mark that the index is complete.
    index = next(folder.glob("*GPTDataset-train-sample_index.npy"))
    index.write_bytes(index.read_bytes()[:100])
    (folder / "complete").unlink()
    assert torch.equal(build(settings, tmp_path, 40, content_key="a").train[0]["tokens"], first)
    build(settings, tmp_path, 40, content_key="b")
    assert len(list(tmp_path.glob("????????????????????????????????"))) == 2
