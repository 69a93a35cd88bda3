"""Tests of loss masks next to the data: the tokens that count are those of the file."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from pretrain.config import DataConfig
from pretrain.data.datasets import Ends, batches
from tests.pretrain.conftest import SMALL
from tests.pretrain.data_folder import write_folder, write_mask
from tests.pretrain.test_data import build

EOD = 4999


def write_positions(folder: Path, first: int) -> list[list[int]]:
    """Write a data folder in which each id is its position plus ``first``, except for EOD."""
    dice = random.Random(first)
    sizes = [dice.randint(2, 90) for _ in range(40)]
    starts = accumulate(sizes, initial=first)
    documents = [
        [*range(start, start + size - 1), EOD] for start, size in zip(starts, sizes, strict=False)
    ]
    write_folder(folder, documents=documents, vocab_size=EOD + 1, dtype="int32")
    return documents


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_labels_that_count_are_those_of_the_mask_in_any_blend(
    packing: str, tmp_path: Path
) -> None:
    """The batches equal those of the plain data except for the loss mask, with each handling of
    document ends; a mask that counts every token changes nothing.
    """
    masked, plain = tmp_path / "masked", tmp_path / "plain"
    documents = write_positions(masked, 0)
    write_positions(plain, 2500)
    dice = random.Random(1)
    mask = bytes(  # every third document does not count at all
        number % 3 > 0 and dice.random() < 0.6
        for number, document in enumerate(documents)
        for _ in document
    )
    blend = ", ".join(f"{{prefix: {folder}/train, weight: 1}}" for folder in (masked, plain))
    words = [*SMALL, f"data.train=[{blend}]", "data.valid=[]", "data.test=[]"]
    words += [f"data.packing={packing}", "data.seq_length=16"]

    def built(name: str) -> Any:
        return build(words, tmp_path / name, 200, vocab_size=EOD + 1)

    data = [built("without")]
    write_mask(masked, "train", bytes([1]) * len(mask))
    data.append(built("all"))
    write_mask(masked, "train", mask)
    data.append(built("some"))
    assert data[0].dataset_index.tolist() == data[2].dataset_index.tolist()
    for number, document in enumerate(documents):  # Megatron itself reads the pair alone
        assert IndexedDataset(f"{masked}/train").get(number).tolist() == document
    counts = torch.ones(2 * EOD)
    counts[: len(mask)] = torch.tensor([*mask], dtype=torch.float32)
    empty = 0
    for handling in ({}, {"documents": "separate"}, {"documents": "separate", "eod_loss": False}):
        ends = Ends.of(DataConfig(**handling), EOD)
        streams = [batches(each, 0, 2, torch.device("cpu"), ends=ends) for each in data]
        for _ in range(100):
            wanted, same, found = map(next, streams)
            tokens, labels = wanted["tokens"], wanted["labels"]
            position = torch.where(labels == EOD, tokens + 1, labels)
            wanted_mask = wanted["loss_mask"] * counts[position]
            assert torch.equal(found.pop("loss_mask"), wanted_mask)
            empty += int((wanted_mask.sum(1) == 0).sum())
            assert torch.equal(same.pop("loss_mask"), wanted.pop("loss_mask"))
            for one in (same, found):
                assert (context := one.pop("context", None)) is None or torch.equal(
                    context.positions, wanted["context"].positions
                )
                assert all(torch.equal(one[key], wanted[key]) for key in one)
    assert empty, "no sequence without a counted token"
