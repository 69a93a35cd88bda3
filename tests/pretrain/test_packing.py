"""Tests of best-fit packing: fitting documents stay complete, no token is lost, padding has no
effect, and the result follows the definition.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fem_megatron.config import ModelConfig
from pretrain.config import DataConfig
from pretrain.data.datasets import Ends, batches
from pretrain.data.packing import Share, best_fit, pack, passes, share
from pretrain.data.part_lengths import packed_shares
from tests.pretrain.conftest import SMALL, Command, back_to
from tests.pretrain.data_folder import write_folder
from tests.pretrain.test_data import build
from tests.ranks import losses

EOD, LENGTH = 499, 32
SIZES = (
    [(1, 1)] * 3
    + [(2, 6)] * 6
    + [(18, 30)] * 30
    + [(31, 31)] * 8
    + [(32, 34)] * 12
    + [(65, 66)] * 2
    + [(97, 98)] * 2
    + [(60, 100)] * 6
)


def corpus(folder: Path, seed: int = 0) -> list[list[int]]:
    """Return documents with 1, length + 1, length + 2, 2 * length + 1, ... tokens in a data folder;
    the first is longer than a sequence.
    """
    dice = random.Random(seed)
    sizes = [40, *(dice.randint(*limits) for limits in SIZES)]
    documents = [[*(dice.randrange(1, 60) for _ in range(size - 1)), EOD] for size in sizes]
    write_folder(folder, documents=documents)
    return documents


def packed(folder: Path, *more: str) -> list[str]:
    given = [
        f"data.train=[{{prefix: {folder}/train}}]",
        f"data.valid=[{{prefix: {folder}/valid}}]",
        "data.test=[]",
        "data.packing=best_fit",
    ]
    return [*SMALL, *given, *more]


def sequences(lengths: list[int], length: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Return (document, first token, end) for the pieces of each sequence."""
    array = np.array(lengths, np.int32)
    packing = pack(array, length, seed)
    pieces = [(document, before * length) for document, before in packing.pieces.tolist()]
    spans = [
        (document, start, min(lengths[document], start + length + 1)) for document, start in pieces
    ]
    return [
        spans[first:end]
        for first, end in zip(packing.first[:-1].tolist(), packing.first[1:].tolist(), strict=True)
    ]


def naive(sizes: list[int], capacity: int) -> list[list[int]]:
    """Pack by the definition: one after another, the largest first, into the fullest bin with
    enough space.
    """
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [some for some in bins if sum(some) + size <= capacity]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            bins.append([size])
    return bins


def test_the_plan_counts_the_parts_that_sequences_hold() -> None:
    """The last token of a sequence, which is only a label, counts as read if no padding follows:
    one of 33 in this test.
    """
    dice = random.Random(1)
    lengths = [dice.randint(1, 90) for _ in range(400)]
    tokens = np.zeros(LENGTH + 1)
    for pieces in sequences(lengths, LENGTH, 0):
        sizes = [min(end - start, LENGTH) for _, start, end in pieces]
        for size in (*sizes, max(0, LENGTH - sum(sizes))):
            tokens[size] += size
    np.testing.assert_allclose(
        packed_shares(np.array(lengths, np.int32), LENGTH), tokens / tokens.sum(), rtol=1e-12
    )


@pytest.mark.parametrize("seed", range(30))
def test_it_is_best_fit_decreasing(seed: int) -> None:
    """The remaining space of every sequence and the sizes that meet agree up to exchanges of equal
    spaces; few moves.
    """
    dice = random.Random(seed)
    capacity = dice.randint(1, 60)
    sizes = [dice.randint(1, dice.randint(1, capacity)) for _ in range(dice.randint(0, 300))]
    counts = np.bincount(sizes, minlength=capacity + 1).tolist()
    placed, used, left = best_fit(counts, capacity)
    assert placed == sorted(placed, key=lambda at: -at.size)
    ours: list[list[int]] = [[] for _ in range(used)]
    for size, first, end, each in placed:
        for number in range(first, end):
            ours[number].extend([size] * each)
    wanted = naive(sizes, capacity)
    assert Counter(map(sum, ours)) == Counter(map(sum, wanted))
    assert sorted(chain(*ours)) == sorted(sizes)
    assert left == {
        capacity - total: count
        for total, count in Counter(map(sum, wanted)).items()
        if total < capacity
    }
    assert len(placed) <= 4 * len(set(sizes)) * capacity.bit_length()


@pytest.mark.parametrize("seed", range(12))
def test_what_fits_is_whole_and_every_token_is_there_once(seed: int) -> None:
    """The token at a split is the label of one sequence and the first of another: pieces overlap
    only at splits.
    """
    dice = random.Random(seed)
    length, most = dice.choice([(1, 5), (2, 9), (7, 15), (7, 40), (32, 300)])
    lengths = [dice.randint(0, dice.randint(0, most)) for _ in range(300)] + [
        length,
        length + 1,
        length + 2,
        2 * length + 1,
        2 * length + 2,
    ]
    made, found = sequences(lengths, length, seed), Counter[tuple[int, int]]()
    for pieces in made:
        assert 0 < sum(end - start for _, start, end in pieces) <= length + 1
        found.update(
            (document, token)
            for document, start, end in pieces
            for token in range(start + bool(start), end)
        )
        assert all(
            start == 0 and end == lengths[document]
            for document, start, end in pieces
            if lengths[document] <= length + 1
        )
    assert found == Counter(
        (document, token) for document, size in enumerate(lengths) for token in range(size)
    )
    read = [min(length, sum(end - start for _, start, end in pieces)) for pieces in made]
    cut = sum(size > length + 1 for size in lengths)
    report = Share(len(made), len(made) * length - sum(read), sum(map(bool, lengths)), cut)
    assert share(np.array(lengths, np.int32), length) == report
    assert sequences(lengths, length, seed) == made != sequences(lengths, length, seed + 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_padding_is_within_the_known_bound(seed: int) -> None:
    """With document lengths of the web, where one document in twenty is longer than a sequence:
    below 0.1%.
    """
    lengths = np.random.RandomState(seed).lognormal(6.3, 1.1, 50_000).astype(np.int32) + 1
    of = share(lengths, 4096)
    assert 0.02 < of.cut / of.documents < 0.05 and 0 <= of.padding < 1e-3 * of.sequences * 4096


def test_every_pass_is_whole_and_of_its_own_order() -> None:
    """A longer run begins like the shorter one, over as many passes."""
    order = passes(50, 101, 3)
    assert len(order) == 150 and len(passes(50, 100, 3)) == 100 and len(passes(50, 0, 3)) == 50
    first, second = order[:50].tolist(), order[50:100].tolist()
    assert sorted(first) == sorted(second) == list(range(50)) != first != second
    assert np.array_equal(order[:50], passes(50, 50, 3))
    assert not np.array_equal(order[:50], passes(50, 50, 4))


@pytest.mark.usefixtures("groups")
def test_samples_are_their_pieces_and_padding_is_a_document_of_its_own(tmp_path: Path) -> None:
    """Checked token by token over two passes: tokens that continue a document count in the loss,
    and the first of a complete document after an end.
    """
    documents = corpus(tmp_path / "data")
    made = sequences([len(document) for document in documents], LENGTH, 42)
    train = build(packed(tmp_path / "data"), tmp_path / "cache", len(made) + 1)
    order = passes(len(made), len(made) + 1, 42).tolist()
    assert len(train) == len(order) == 2 * len(made) and any(len(pieces) > 2 for pieces in made)
    ends = Ends.of(DataConfig(documents="separate"), EOD)
    stream = batches(train, 0, 2, torch.device("cpu"), ends=ends)
    kinds = Counter[str]()
    for first in range(0, len(order), 2):
        batch = next(stream)
        for row in range(2):
            text = list[int]()
            counts = list[float]()
            positions = list[int]()
            for document, start, end in made[order[first + row]]:
                kinds["a rest behind another's end" if text and start else "first"] += 1
                text += documents[document][start:end]
                counts += [float(start == 0)] + [1.0] * (end - start - 1)
                positions += range(end - start)
            padding = LENGTH + 1 - len(text)
            kinds[f"{min(padding, 3)} tokens short"] += 1
            text = text + [0] * padding
            counts = counts + [0.0] * padding
            positions = [*positions, *range(padding)]
            assert batch["tokens"][row].tolist() == text[:-1]
            assert batch["labels"][row].tolist() == text[1:]
            assert batch["loss_mask"][row].tolist() == counts[1:]
            assert batch["position_ids"][row].tolist() == list(range(LENGTH))
            assert batch["context"].positions[:, row].tolist() == positions[:-1]
    assert len(kinds) == 6, kinds


@pytest.mark.usefixtures("groups")
def test_loss_and_gradients_are_those_of_the_documents_alone_whatever_padding_is(
    tmp_path: Path,
) -> None:
    from fem_megatron.megatron.model import Layout
    from fem_megatron.megatron.model import build as build_model
    from pretrain.engines.building import forward, summed_loss

    documents = corpus(tmp_path / "data")
    made = sequences([len(document) for document in documents], LENGTH, 42)
    train = build(packed(tmp_path / "data"), tmp_path / "cache", 1)
    order = passes(len(made), 1, 42).tolist()
    given = ModelConfig(
        hidden_size=32,
        num_layers=2,
        pattern=("fem_gla", "cem"),
        num_attention_heads=4,
        ffn_hidden_size=48,
        vocab_size=500,
    )
    (model,) = build_model(given, Layout(params_dtype=torch.float64), LENGTH, seed=1)

    def loss_and_gradients(total: torch.Tensor, count: torch.Tensor | int) -> list[torch.Tensor]:
        model.zero_grad()
        (total / count).backward()
        return [total.detach() / count, *(weight.grad.clone() for weight in model.parameters())]

    def read(batch: dict[str, Any]) -> list[torch.Tensor]:
        return loss_and_gradients(*summed_loss(forward(model, batch), batch)[:2])

    batch = next(
        batches(
            train,
            0,
            8,
            torch.device("cpu"),
            ends=Ends.of(DataConfig(documents="separate", eod_loss=False), EOD),
        )
    )
    total, count = torch.zeros(()), 0
    for document, start, end in chain(*(made[row] for row in order[:8])):
        text = torch.tensor([documents[document][start:end]])
        if end - start > 1:
            total = (
                total
                + model(
                    text[:, :-1], torch.arange(end - start - 1)[None], None, labels=text[:, 1:]
                ).sum()
            )
            count += end - start - 1
    padding = batch["loss_mask"].flip(1).cummax(1).values.flip(1).roll(1, 1) == 0
    padding[:, 0] = False
    padding &= batch["tokens"] != EOD
    assert batch["loss_mask"].sum() == count and 20 < padding.sum() < 8 * LENGTH - count
    other = {key: value.clone() for key, value in batch.items() if key != "context"}
    for key, moved in (("tokens", padding), ("labels", batch["loss_mask"] == 0)):
        other[key][moved] = torch.randint(
            1, 60, (int(moved.sum()),), generator=torch.Generator().manual_seed(0)
        )
    # Megatron computes the cross-entropy in float32.
    for got, wanted in zip(read(batch), loss_and_gradients(total, count), strict=True):
        assert (got - wanted).abs().max() <= 2e-6 * max(1e-2, wanted.abs().max().item())
    # Bit-identical with separate documents. With joined documents, the sums of fem_gla contain
    # constants of the entire sequence: equal up to the rounding of float64.
    for there, by in (({"context": batch["context"]}, 0.0), ({"context": None}, 1e-14)):
        for a, b in zip(*(read({**some, **there}) for some in (batch, other)), strict=True):
            assert (a - b).abs().max() <= by * a.abs().max()


def test_a_run_resumes_within_a_pass_and_continues_into_more(
    pretrain: Command, tmp_path: Path
) -> None:
    """96 samples, more than one pass; a length at which a stream would be refused does not change
    the order.
    """
    corpus(tmp_path / "data")
    words = [
        *packed(
            tmp_path / "data",
            "train.global_batch_size=8",
            "data.documents=separate",
            "train.precision=fp32",
        ),
        "train.eval_interval=0",
        "log.diagnostics_interval=0",
    ]
    pretrain(*words)
    report = next(line for line in pretrain.out.splitlines() if "best_fit" in line)
    straight = losses(pretrain.run_dir)
    back_to(pretrain.run_dir, 4)
    assert "at step 4" in pretrain(*words)
    assert losses(pretrain.run_dir) == straight and len(straight) == 12
    pretrain(*words, "train.steps=20")
    assert "data.packing is best_fit in the checkpoint, stream now" in pretrain.refused(
        *words, "data.packing=stream"
    )
    for verb in ("--plan", "--index"):
        pretrain(*words, verb)
        assert report in pretrain.out.splitlines()
    assert "unchanged" in pretrain.out
    assert "unchanged" not in pretrain(*words, "data.packing=stream", "--index")
    assert "best_fit" not in pretrain.out
