"""The indexed format against megatron-core's own builder and reader, and against datatrove's writer; and its use of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from data_prep.store.indexed import (
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
from tests.data_prep.conftest import ROOT

EOD = 0


def some_documents(vocab_size: int, number: int, seed: int) -> list[list[int]]:
    """Documents as lists of ids, EOD at the end of each."""
    random_ = np.random.default_rng(seed)
    sizes = random_.integers(0, 40, size=number)
    return [[*random_.integers(1, vocab_size, size=size).tolist(), EOD] for size in sizes]


def write_ours(prefix: Path, documents: list[list[int]], dtype: str, batch: int) -> None:
    writer = IndexedWriter(prefix, dtype)
    for start in range(0, len(documents), batch):
        part = documents[start : start + batch]
        writer.add(np.concatenate([np.array(ids, np.uint32) for ids in part]), np.array([len(ids) for ids in part]))
    written = writer.finish()
    assert (written.documents, written.tokens) == (len(documents), sum(map(len, documents)))
    assert written.bin_bytes == with_ending(prefix, "bin").stat().st_size
    assert written.idx_bytes == with_ending(prefix, "idx").stat().st_size == index_bytes_of(len(documents))


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 130000])
@pytest.mark.parametrize("number", [1, 2, 57])
def test_bytes_equal_megatrons_builder(tmp_path: Path, vocab_size: int, number: int) -> None:
    documents = some_documents(vocab_size, number, seed=number)
    dtype = DType.optimal_dtype(vocab_size)
    assert dtype_name(vocab_size) == dtype.__name__
    write_ours(tmp_path / "ours", documents, dtype_name(vocab_size), batch=10)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


@pytest.mark.parametrize(("vocab_size", "token_size"), [(300, 2), (130000, 4)])
def test_bytes_equal_datatroves_writer(tmp_path: Path, vocab_size: int, token_size: int) -> None:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    documents = some_documents(vocab_size, 41, seed=4)
    write_ours(tmp_path / "ours", documents, dtype_name(vocab_size), batch=6)
    theirs = MegatronTokenizedFile(str(tmp_path), "theirs", token_size=token_size)
    for document in documents:
        theirs.write(document)
    theirs.close()
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


@pytest.mark.parametrize("vocab_size", [300, 130000])
def test_megatron_reads_what_was_written(tmp_path: Path, vocab_size: int) -> None:
    documents = some_documents(vocab_size, 80, seed=3)
    write_ours(tmp_path / "ours", documents, dtype_name(vocab_size), batch=7)
    dataset = IndexedDataset(str(tmp_path / "ours"))
    assert len(dataset) == len(documents)
    assert all(dataset[i].tolist() == document for i, document in enumerate(documents))
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


def test_batching_does_not_show(tmp_path: Path) -> None:
    documents = some_documents(500, 30, seed=1)
    for batch in (1, 4, 30):
        write_ours(tmp_path / f"by{batch}", documents, "uint16", batch)
    for kind in ("bin", "idx"):
        assert len({(tmp_path / f"by{batch}.{kind}").read_bytes() for batch in (1, 4, 30)}) == 1


@pytest.mark.parametrize("dtype", [">u4", "<u4", ">i8", "<u2", "int32"])
def test_the_type_and_byte_order_of_the_ids_do_not_show(tmp_path: Path, dtype: str) -> None:
    ids = np.array([258, 515, EOD, 1, EOD])
    writer = IndexedWriter(tmp_path / "a", "uint16")
    writer.add(ids.astype(dtype), np.array([3, 2]))
    writer.add(ids[:0].astype(dtype), np.zeros(0, np.int64))
    writer.finish()
    assert (tmp_path / "a.bin").read_bytes() == bytes([2, 1, 3, 2, 0, 0, 1, 0, 0, 0])
    assert read_index(tmp_path / "a.idx").lengths.tolist() == [3, 2]


def test_a_prefix_may_hold_dots(tmp_path: Path) -> None:
    write_ours(tmp_path / ".00007~host.example~1", some_documents(300, 3, seed=2), "uint16", batch=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".00007~host.example~1.bin", ".00007~host.example~1.idx"]


@pytest.mark.parametrize(
    ("ids", "lengths", "said"),
    [
        ([1, 2, 65536], [3], "do not fit uint16"),
        ([1, -1, 0], [3], "do not fit uint16"),
        ([1, 2, 0], [2], "3 ids for documents of 2"),
        ([1, 2, 0], [3, 0], "the shortest of 0"),
    ],
)
def test_ids_that_cannot_be_written_are_refused(tmp_path: Path, ids: list[int], lengths: list[int], said: str) -> None:
    writer = IndexedWriter(tmp_path / "a", "uint16")
    with pytest.raises(ValueError, match=said):
        writer.add(np.array(ids), np.array(lengths))
    assert writer.finish().tokens == 0


def test_a_document_longer_than_the_format_counts_is_refused(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", "uint16")
    ids = np.broadcast_to(np.ones(1, np.uint16), (2**31,))
    with pytest.raises(UserError, match="a document of 2147483648 ids"):
        writer.add(ids, np.array([2**31]))
    writer.close()


def test_pointers_do_not_overflow_32_bits() -> None:
    lengths = np.full(3, 2**30, dtype=np.int32)
    raw = index_bytes(lengths, "int32")
    pointers = np.frombuffer(raw, "<i8", 3, len(raw) - 4 * 8 - 3 * 8)
    assert pointers.tolist() == [0, 2**32, 2**33]


@pytest.mark.parametrize("cuts", [[], [0], [1, 1, 5], [7], [3, 10]])
def test_an_index_written_in_parts_is_the_index(tmp_path: Path, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.store.indexed.DOCUMENTS_AT_ONCE", 4)
    lengths = np.arange(1, 11, dtype=np.int32)
    size, digest = write_index(tmp_path / "a.idx", 10, "int32", lambda: np.split(lengths, cuts))
    raw = (tmp_path / "a.idx").read_bytes()
    ends = np.cumsum(lengths)
    assert raw == index_bytes(lengths, "int32") and len(raw) == size
    assert (
        raw[34:] == lengths.astype("<i4").tobytes() + (4 * (ends - lengths)).astype("<i8").tobytes() + np.arange(11, dtype="<i8").tobytes()
    )
    from hashlib import sha256

    assert sha256(raw).hexdigest() == digest


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


def test_an_index_without_documents_can_be_read(tmp_path: Path) -> None:
    IndexedWriter(tmp_path / "a", "uint16").finish()
    index = read_index(tmp_path / "a.idx")
    assert (len(index.lengths), len(index.pointers), index.document_indices.tolist()) == (0, 0, [0])


def test_memory_does_not_grow_with_the_index(tmp_path: Path) -> None:
    """The index of 20 million documents, 400 MB, in less than 150 MB over what numpy takes."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from data_prep.store.indexed import read_index, write_index
part = np.full(1_000_000, 700, np.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size, _ = write_index(Path(sys.argv[1]), 20_000_000, "uint16", lambda: (part for _ in range(20)))
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, read_index(Path(sys.argv[1])).pointers[-1])
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.idx")], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    size, grown, last = map(int, result.stdout.split())
    assert size == 34 + 20 * 20_000_000 + 8 and last == 1400 * (20_000_000 - 1)
    assert grown < 150_000
