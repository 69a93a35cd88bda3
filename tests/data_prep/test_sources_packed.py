"""Packed JSON lines: gzip and zstd streams unpacked as their tools do, damaged ones read as far as they go."""

from __future__ import annotations

import gzip
import json
import random
import struct
from pathlib import Path

import pytest

from data_prep.sources import Columns, Unreadable, open_files, spans
from data_prep.sources.streams import chunks
from tests.data_prep.sources_made import Read, packed, parts, read_all, row, write_lines

COLUMNS = Columns()


def rows_of(path: Path, content: bytes) -> list[Read]:
    """All that is read of a file of that content."""
    path.write_bytes(content)
    (file,) = open_files([str(path)], COLUMNS)
    return read_all(file, spans(file, COLUMNS, 1 << 40))


LINES = [json.dumps(row(i, words=50)).encode() for i in range(2000)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_several_members_are_one_stream(tmp_path: Path, suffix: str) -> None:
    name = f"x.jsonl.{suffix}"
    content = b"\n".join(LINES)
    pieces = [content[i : i + 50_001] for i in range(0, len(content), 50_001)]
    members = [packed(name, piece) for piece in [b"", *pieces, b""]]
    if suffix == "gz":
        members += [b"\0" * 700]
    else:
        members = [struct.pack("<II", 0x184D2A50, 9) + b"x" * 9, *members]
    found = rows_of(tmp_path / name, b"".join(members))
    assert found == [(item["text"].encode(), item["id"].encode(), place) for item, place in _placed()]


def _placed() -> list[tuple[dict[str, str], int]]:
    place, found = 0, []
    for line in LINES:
        found.append((json.loads(line), place))
        place += len(line) + 1
    return found


def noisy(number: int) -> bytes:
    """Lines that do not pack well, so that a cut has much before it."""
    random_ = random.Random(number)
    return b"\n".join(json.dumps({"text": random_.randbytes(2000).hex(), "id": str(i)}).encode() for i in range(2000)) + b"\n"


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_stream_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path, suffix: str, share: float) -> None:
    content, name = noisy(1), f"x.jsonl.{suffix}"
    whole = packed(name, content)
    *rows, last = rows_of(tmp_path / name, whole[: int(len(whole) * share)])
    lines = content.split(b"\n")
    assert [text for text, _, _ in rows] == [json.loads(line)["text"].encode() for line in lines[: len(rows)]]
    assert last[:2] == ("cut_off", 1)
    assert last[2] == sum(len(line) + 1 for line in lines[: len(rows)])
    lost = share * len(content) - last[2]
    assert lost < 200_000


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damage_within_a_stream_or_behind_it_cuts_the_rest_off(tmp_path: Path, suffix: str) -> None:
    content, name = noisy(2), f"x.jsonl.{suffix}"
    whole = packed(name, content)
    middle = bytearray(whole)
    middle[len(whole) // 2 : len(whole) // 2 + 1000] = bytes(1000)
    texts = [json.loads(line)["text"].encode() for line in content.splitlines()]
    for damaged, least in ((bytes(middle), 950), (whole + b"garbage behind the end", 1998)):
        *rows, last = rows_of(tmp_path / name, damaged)
        assert len(rows) >= least or suffix == "gz"
        assert [text for text, _, _ in rows[:950]] == texts[: min(950, len(rows))]
        assert last[:2] == ("cut_off", 1)
        file = open_files([str(tmp_path / name)], COLUMNS)[0]
        *_, fault = parts(file, spans(file, COLUMNS, 1), COLUMNS)
        assert isinstance(fault, Unreadable)
        assert fault.message.startswith(f"{file.path} is damaged at byte {last[2]} of its unpacked content (")
        assert fault.message.endswith("): what follows is lost; fetch or pack it again")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("zeros", [1, 2, 3, 4, 8, 70_000])
def test_zeros_between_and_behind_members_are_no_content(tmp_path: Path, suffix: str, zeros: int) -> None:
    content, name = noisy(3), f"x.jsonl.{suffix}"
    half = content.index(b"\n", len(content) // 2) + 1
    whole = rows_of(tmp_path / name, packed(name, content))
    assert len(whole) == 2000
    for members in ([content], [content[:half], content[half:]]):
        assert rows_of(tmp_path / name, b"".join(packed(name, member) + bytes(zeros) for member in members)) == whole


def test_gzip_is_unpacked_as_gzip_does_whatever_the_members(tmp_path: Path) -> None:
    random_ = random.Random(5)
    for _ in range(60):
        contents = [random_.randbytes(random_.randrange(5)) * random_.choice([1, 70_000, 600_000]) for _ in range(random_.randrange(1, 5))]
        whole = b"".join(gzip.compress(content, random_.randrange(10)) for content in contents) + bytes(random_.choice([0, 3, 70_000]))
        (tmp_path / "x").write_bytes(whole)
        with (tmp_path / "x").open("rb") as file:
            assert b"".join(chunks(file, "jsonl.gz")) == b"".join(contents)


def zstd_frame(random_: random.Random, content: bytes) -> bytes:
    """A frame of stored and repeated blocks, with every field of the header that may be there but the dictionary."""
    blocks, at = [], 0
    while at < len(content):
        size = random_.choice([1, 100, 1 << 17])
        block, at = content[at : at + size], at + size
        same = block == block[:1] * len(block)
        blocks.append((len(block) << 3 | same << 1).to_bytes(3, "little") + (block[:1] if same else block))
    blocks.append(b"\x01\0\0")  # the last one, empty: many writers end so
    sizes = [len(content) >= 256, *(len(content) < 1 << 32,) * 2]
    flag = random_.choice([0, *(number for number, fits in enumerate(sizes, 1) if fits)])
    single = flag > 1 and random_.random() < 0.5
    told = (
        (len(content) - (256 if flag == 1 else 0)).to_bytes(8, "little")[: (0, 2, 4, 8)[flag]]
        if flag != 1 or len(content) < 65_792
        else b""
    )
    head = bytes([(flag if told else 0) << 6 | single << 5]) + (b"" if single else b"\x58") + told
    return b"\x28\xb5\x2f\xfd" + head + b"".join(blocks)


def test_zstd_is_unpacked_as_it_was_packed_whatever_the_frames(tmp_path: Path) -> None:
    random_ = random.Random(6)
    for _ in range(60):
        whole, contents = b"", []
        for _ in range(random_.randrange(1, 6)):
            content = random_.choice([random_.randbytes(3), b"\0", bytes(5)]) * random_.choice([0, 1, 90, 70_000])
            contents.append(content)
            whole += random_.choice([packed("x.zst", content), zstd_frame(random_, content)]) + bytes(random_.choice([0, 0, 1, 5]))
            whole += random_.choice([b"", struct.pack("<II", 0x184D2A5F, 70_000) + random_.randbytes(70_000)])
        (tmp_path / "x").write_bytes(whole)
        with (tmp_path / "x").open("rb") as file:
            assert b"".join(chunks(file, "jsonl.zst")) == b"".join(contents)


def test_zeros_within_a_zstd_frame_are_damage(tmp_path: Path) -> None:
    content = noisy(4)
    whole = zstd_frame(random.Random(0), content)[:-1]
    *rows, last = rows_of(tmp_path / "x.jsonl.zst", whole[: len(whole) // 2] + bytes(1000))
    assert [text for text, _, _ in rows] == [json.loads(line)["text"].encode() for line in content.splitlines()[: len(rows)]]
    assert 900 < len(rows) <= 1000
    assert last[:2] == ("cut_off", 1)


def test_estimates_of_text_follow_the_packing(tmp_path: Path) -> None:
    content = b"\n".join(LINES) * 3
    text = 3 * sum(len(item["text"].encode()) for item, _ in _placed())
    for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst"):
        file = open_files([str(write_lines(tmp_path / name, [content]))], COLUMNS)[0]
        assert abs(file.text_bytes / text - 1) < 0.35, file
