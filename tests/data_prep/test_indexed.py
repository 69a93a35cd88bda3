"""The indexed format against megatron-core's own builder and reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from data_prep.indexed import FormatError, IndexedWriter, dtype_name, index_bytes, read_index

EOD = 0


def some_documents(vocab_size: int, number: int, seed: int) -> list[list[int]]:
    random_ = np.random.default_rng(seed)
    return [random_.integers(1, vocab_size, size=size).tolist() for size in random_.integers(0, 40, size=number)]


def write_ours(prefix: Path, documents: list[list[int]], dtype: str, batch: int) -> None:
    writer = IndexedWriter(prefix, dtype)
    for start in range(0, len(documents), batch):
        writer.add(documents[start : start + batch], EOD)
    written = writer.finish()
    assert written.documents == len(documents)
    assert written.bin_bytes == prefix.with_suffix(".bin").stat().st_size
    assert written.idx_bytes == prefix.with_suffix(".idx").stat().st_size


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 130000])
@pytest.mark.parametrize("number", [1, 2, 57])
def test_bytes_equal_megatrons_builder(tmp_path: Path, vocab_size: int, number: int) -> None:
    documents = some_documents(vocab_size, number, seed=number)
    dtype = DType.optimal_dtype(vocab_size)
    assert dtype_name(vocab_size) == dtype.__name__
    write_ours(tmp_path / "ours", documents, dtype_name(vocab_size), batch=10)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor([*document, EOD]), [len(document) + 1])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


@pytest.mark.parametrize("vocab_size", [300, 130000])
def test_megatron_reads_what_was_written(tmp_path: Path, vocab_size: int) -> None:
    documents = some_documents(vocab_size, 80, seed=3)
    write_ours(tmp_path / "ours", documents, dtype_name(vocab_size), batch=7)
    dataset = IndexedDataset(str(tmp_path / "ours"))
    assert len(dataset) == len(documents)
    assert all(dataset[i].tolist() == [*document, EOD] for i, document in enumerate(documents))
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


def test_batching_does_not_show(tmp_path: Path) -> None:
    documents = some_documents(500, 30, seed=1)
    for batch in (1, 4, 30):
        write_ours(tmp_path / f"by{batch}", documents, "uint16", batch)
    for kind in ("bin", "idx"):
        assert len({(tmp_path / f"by{batch}.{kind}").read_bytes() for batch in (1, 4, 30)}) == 1


def test_pointers_do_not_overflow_32_bits() -> None:
    lengths = np.full(3, 2**30, dtype=np.int32)
    raw = index_bytes(lengths, "int32")
    pointers = np.frombuffer(raw, "<i8", 3, len(raw) - 4 * 8 - 3 * 8)
    assert pointers.tolist() == [0, 2**32, 2**33]


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"X" + raw[1:], lambda raw: raw[:20], lambda raw: b""]
)
def test_damaged_index_is_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.idx"
    whole = index_bytes(np.array([3, 4], dtype=np.int32), "uint16")
    path.write_bytes(whole)
    assert read_index(path).lengths.tolist() == [3, 4]
    path.write_bytes(damage(whole))
    with pytest.raises(FormatError):
        read_index(path)


def test_unknown_dtype_code_is_refused(tmp_path: Path) -> None:
    raw = bytearray(index_bytes(np.array([3], dtype=np.int32), "uint16"))
    raw[17] = 7
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(FormatError, match="dtype code 7"):
        read_index(tmp_path / "a.idx")
