"""Tests of the indexed format against megatron-core's builder and reader and datatrove's writer,
and of its memory use.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from data_prep.prepared.indexed import (
    FormatError,
    IndexedWriter,
    dtype_name,
    index_bytes,
    index_bytes_of,
    read_index,
    with_ending,
    write_index,
)
from fem_common.errors import UserError
from tests.data_prep import conftest as base

EOD = 0


def some_documents(vocab_size: int, number: int) -> list[list[int]]:
    """Return documents as lists of ids with EOD at the end of each."""
    random_ = np.random.default_rng(number)
    return [
        [*random_.integers(1, vocab_size, size=size).tolist(), EOD]
        for size in random_.integers(0, 40, size=number)
    ]


def write_ours(prefix: Path, documents: list[list[int]], dtype: str, batch: int) -> None:
    writer = IndexedWriter(prefix, dtype)
    for start in range(0, len(documents), batch):
        part = documents[start : start + batch]
        writer.add(
            np.concatenate([np.array(ids, np.uint32) for ids in part]),
            np.array([len(ids) for ids in part]),
        )
    written = writer.finish()
    assert (written.documents, written.tokens) == (len(documents), sum(map(len, documents)))
    assert written.bin_bytes == with_ending(prefix, "bin").stat().st_size
    assert (
        written.idx_bytes
        == with_ending(prefix, "idx").stat().st_size
        == index_bytes_of(len(documents))
    )


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 130000])
@pytest.mark.parametrize("number", [1, 2, 57])
def test_bytes_equal_megatrons_and_datatroves_whatever_the_batches(
    tmp_path: Path, vocab_size: int, number: int
) -> None:
    documents, dtype = some_documents(vocab_size, number), DType.optimal_dtype(vocab_size)
    assert dtype_name(vocab_size) == dtype.__name__
    for batch in (1, 10, 100):
        write_ours(
            tmp_path / f".by~{batch}.x", documents, dtype_name(vocab_size), batch
        )  # a prefix may contain dots
    builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=dtype)
    datatrove = MegatronTokenizedFile(
        str(tmp_path), "datatrove", token_size=np.dtype(dtype).itemsize
    )
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
        datatrove.write(document)
    builder.finalize(str(tmp_path / "megatron.idx"))
    datatrove.close()
    for kind in ("bin", "idx"):
        files = list(tmp_path.glob(f"*.{kind}"))
        assert len(files) == 5  # three of ours
        assert len({path.read_bytes() for path in files}) == 1
    dataset = IndexedDataset(str(tmp_path / ".by~10.x"))
    assert len(dataset) == len(documents) and all(
        dataset[i].tolist() == document for i, document in enumerate(documents)
    )
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize("dtype", [">u4", "<u4", ">i8", "<u2", "int32"])
def test_the_type_and_byte_order_of_the_ids_do_not_show(tmp_path: Path, dtype: str) -> None:
    ids = np.array([258, 515, EOD, 1, EOD]).astype(dtype)
    writer = IndexedWriter(tmp_path / "a", "uint16")
    writer.add(ids, np.array([3, 2]))
    writer.add(ids[:0], np.zeros(0, np.int64))
    writer.finish()
    assert (tmp_path / "a.bin").read_bytes() == bytes([2, 1, 3, 2, 0, 0, 1, 0, 0, 0])
    assert read_index(tmp_path / "a.idx").lengths.tolist() == [3, 2]


def test_ids_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", "uint16")
    for ids, lengths, output in (
        ([1, 2, 65536], [3], "do not fit uint16"),
        ([1, -1, 0], [3], "do not fit uint16"),
        ([1, 2, 0], [2], "3 ids for documents of 2"),
        ([1, 2, 0], [3, 0], "the shortest of 0"),
    ):
        with pytest.raises(ValueError, match=output):
            writer.add(np.array(ids), np.array(lengths))
    with pytest.raises(UserError, match="a document of 2147483648 ids"):
        writer.add(np.broadcast_to(np.ones(1, np.uint16), (2**31,)), np.array([2**31]))
    assert writer.finish().tokens == 0
    index = read_index(tmp_path / "a.idx")
    assert (len(index.lengths), len(index.pointers), index.document_indices.tolist()) == (0, 0, [0])


def test_pointers_do_not_overflow_32_bits() -> None:
    raw = index_bytes(np.full(3, 2**30, dtype=np.int32), "int32")
    assert np.frombuffer(raw, "<i8", 3, len(raw) - 4 * 8 - 3 * 8).tolist() == [0, 2**32, 2**33]


@pytest.mark.parametrize("cuts", [[], [0], [1, 1, 5], [7], [3, 10]])
def test_an_index_written_in_parts_is_the_index(
    tmp_path: Path, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.arange(1, 11, dtype=np.int32)
    full = index_bytes(lengths, "int32")
    monkeypatch.setattr("data_prep.prepared.indexed.DOCUMENTS_AT_ONCE", 4)
    assert write_index(tmp_path / "a.idx", 10, "int32", lambda: np.split(lengths, cuts)) == (
        len(full),
        sha256(full).hexdigest(),
    )
    assert (tmp_path / "a.idx").read_bytes() == full


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    path, full = tmp_path / "a.idx", index_bytes(np.array([3, 4], dtype=np.int32), "uint16")
    for damaged in (
        full[:-1],
        full + b"\0",
        b"X" + full[1:],
        full[:20],
        b"",
        full[:17] + b"\7" + full[18:],
        full[:9] + b"\2" + full[10:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            read_index(path)


def test_memory_does_not_grow_with_the_index(tmp_path: Path) -> None:
    """The index of 20 million documents, 400 MB, is written with less than 150 MB in addition to
    numpy's memory.
    """
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from data_prep.prepared.indexed import read_index, write_index
part = np.full(1_000_000, 700, np.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size, _ = write_index(Path(sys.argv[1]), 20_000_000, "uint16", lambda: (part for _ in range(20)))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(size, grown, read_index(Path(sys.argv[1])).pointers[-1])
"""
    size, grown, last = map(int, base.python(code, tmp_path / "a.idx").stdout.split())
    assert size == 34 + 20 * 20_000_000 + 8 and last == 1400 * (20_000_000 - 1) and grown < 150_000
