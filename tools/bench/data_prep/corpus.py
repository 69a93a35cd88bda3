"""Corpora for the benchmark, made from Python sources or read from the user's parquet files.

Corpora from Python sources have FineWeb-Edu's schema and document lengths, so that FineWeb-Edu
itself is not needed. The same sources always give the same corpus. Two corpora are made from the
standard library and the installed packages: ``prose`` (docstrings and comments) and ``code``
(complete sources). The texts are ordered by a hash of their path, deduplicated and joined. The
result is cut at line ends into documents. Their lengths are sampled from a lognormal distribution
with FineWeb-Edu's median (3 KB) and mean (4.8 KB). Scores and token counts are placeholders.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import sysconfig
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.encode.encoders import MAX_DOCUMENT_BYTES
from data_prep.verbs.stdlib import SCHEMA
from fem_common.errors import UserError

FORMAT = 2  # increase it when the same arguments give different documents
MEDIAN, MEAN = 3000, 4800  # characters, approximately as in FineWeb-Edu's documents
SHORTEST_PIECE = 200  # characters; shorter docstrings and comments have too little content
LONGEST_LINES = 200  # characters per line on average; a source above it is a table of data
FILES = 8  # so that two workers share the work evenly
ROWS_PER_GROUP = 1000  # as in FineWeb-Edu
# Enough for all the text that data_prep's self-check reads, which counts as start-up as well.
TINY_DOCUMENTS = 256
DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(.*?)\1[ \t]*$', re.MULTILINE | re.DOTALL)
# Start of licence notices, nearly the same text in thousands of files.
NOTICE = re.compile(r"copyright|licen[sc]e", re.IGNORECASE)
COMMENT = re.compile(r"(?:^[ \t]*#[^\n]*\n){3,}", re.MULTILINE)

Piece = tuple[str, str]  # origin, text
Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Corpus:
    """Corpus of parquet files.

    folder: folder that contains the parquet files of the corpus.
    tiny: folder that contains the corpus's first documents in two files, to measure start-up.

    Sizes are in UTF-8 bytes of text.
    """

    name: str
    what: str
    folder: str
    tiny: str
    documents: int
    text_bytes: int
    tiny_documents: int
    tiny_bytes: int
    median_bytes: float
    mean_bytes: float


def make(name: str, megabytes: float, cache: Path, given: Path | None = None) -> Corpus:
    """Return the corpus ``name``, made or from the cache.

    name: "prose", "code", or "given" for the parquet file or folder ``given``.
    megabytes: approximate maximum of its text.
    cache: folder of the corpora, in which earlier results with the same arguments and sources
        are found.

    Documents that data_prep would not write are left out: empty documents, and documents over its
    limit. Raises UserError if the text is too short.
    """
    if given is not None:
        documents = from_parquet(given)
        sources = _listing(
            sorted(given.rglob("*.parquet")) if given.is_dir() else [given], given.parent
        )
        what = f"documents of {given.name}"
    else:
        files = python_files()
        sources = _listing(files, None)
        documents = cut(PIECES[name](files), lengths())
        what = KINDS[name]
    wishes = json.dumps([FORMAT, name, megabytes, platform.python_version(), sources])
    folder = cache / f"{name}-{hashlib.sha256(wishes.encode()).hexdigest()[:12]}"
    seal = folder / "corpus.json"
    if not seal.exists():
        shutil.rmtree(folder, ignore_errors=True)
        made = _write(name, what, documents, megabytes * 1e6, folder)
        seal.write_text(json.dumps(asdict(made), indent=1), encoding="utf-8")
    return Corpus(**json.loads(seal.read_text(encoding="utf-8")))


def _write(name: str, what: str, documents: Iterator[Piece], most: float, folder: Path) -> Corpus:
    rows, total = [], 0
    seen: set[bytes] = set()
    for place, text in documents:
        raw = text.encode("utf-8")
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        if digest in seen or not text.strip() or len(raw) > MAX_DOCUMENT_BYTES:
            continue
        seen.add(digest)
        rows.append(_row(place, text, len(raw), digest))
        total += len(raw)
        if total >= most:
            break
    if len(rows) < 2 * FILES:
        raise UserError(
            f"the corpus {name!r} has {len(rows)} documents; at least {2 * FILES} are needed"
        )
    tiny = rows[:TINY_DOCUMENTS] if len(rows) > 4 * TINY_DOCUMENTS else rows[: len(rows) // 4]
    _write_files(rows, folder / "whole", FILES)
    _write_files(tiny, folder / "tiny", 2)
    sizes = [len(str(row["text"]).encode("utf-8")) for row in rows]
    return Corpus(
        name=name,
        what=what,
        folder=str(folder / "whole"),
        tiny=str(folder / "tiny"),
        documents=len(rows),
        text_bytes=total,
        tiny_documents=len(tiny),
        tiny_bytes=sum(sizes[: len(tiny)]),
        median_bytes=statistics.median(sizes),
        mean_bytes=statistics.mean(sizes),
    )


def _row(place: str, text: str, size: int, digest: bytes) -> dict[str, object]:
    values = (
        text,
        f"<urn:uuid:{uuid.UUID(bytes=digest)}>",
        "bench",
        place,
        place,
        "en",
        0.99,
        size // 4,
        3.0,
        3,
    )
    return dict(zip(SCHEMA.names, values, strict=True))


def _write_files(rows: Rows, folder: Path, files: int) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        part = rows[len(rows) * number // files : len(rows) * (number + 1) // files]
        table = pa.Table.from_pylist(part, schema=SCHEMA)
        pq.write_table(
            table,
            folder / f"{number:05d}.parquet",
            row_group_size=ROWS_PER_GROUP,
            compression="snappy",
        )


# --- sources of text ----------------------------------------------------------------------------


def python_files() -> list[Path]:
    """Return the paths of the standard library's and the packages' sources, ordered by a hash."""
    found: dict[str, Path] = {}
    for root in dict.fromkeys(
        sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")
    ):
        for folder, names, files in os.walk(root):
            names[:] = [
                name
                for name in names
                if name not in ("__pycache__", "site-packages", "dist-packages")
            ]
            for name in files:
                if name.endswith(".py"):
                    path = Path(folder, name)
                    found.setdefault(path.relative_to(root).as_posix(), path)
    return [
        found[name]
        for name in sorted(
            found, key=lambda name: hashlib.blake2b(name.encode("utf-8", "replace")).digest()
        )
    ]


def sources(files: list[Path]) -> Iterator[Piece]:
    """Yield (name, text) of each readable source, except data tables (very long lines)."""
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) <= LONGEST_LINES * (text.count("\n") + 1):
            yield f"{path.parent.name}/{path.name}", text + "\n"


def prose(files: list[Path]) -> Iterator[Piece]:
    """Yield (name, text) of each docstring or comment block, without indentation and duplicates.

    Short docstrings and comments under three lines are left out.
    """
    seen: set[bytes] = set()
    for place, text in sources(files):
        found = [
            (match.start(), textwrap.dedent(match.group(2)).strip())
            for match in DOCSTRING.finditer(text)
        ]
        found += [
            (match.start(), re.sub(r"(?m)^[ \t]*#+ ?", "", match.group()))
            for match in COMMENT.finditer(text)
        ]
        for _, words in sorted(found):
            digest = hashlib.blake2b(words.encode("utf-8"), digest_size=16).digest()
            if (
                len(words) >= SHORTEST_PIECE
                and digest not in seen
                and not NOTICE.search(words[:SHORTEST_PIECE])
            ):
                seen.add(digest)
                yield place, words.rstrip() + "\n\n"


PIECES: dict[str, Callable[[list[Path]], Iterator[Piece]]] = {"prose": prose, "code": sources}
KINDS = {
    "prose": "docstrings and comments of installed Python packages: English about software, "
    "with examples and tables in it",
    "code": "Python sources of the standard library and installed packages",
}


def from_parquet(path: Path) -> Iterator[Piece]:
    """Yield (id, text) of each row in which neither is missing.

    Raises UserError if the files or the columns do not exist.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no .parquet below {path}")
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=1000, columns=["text", "id"]):
                    for row in batch.to_pylist():
                        if row["text"] and row["id"] is not None:
                            yield str(row["id"]), row["text"]
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise UserError(
                f"{file}: not parquet with the columns text and id ({str(error).splitlines()[0]})"
            ) from None


def lengths() -> Iterator[int]:
    """Yield document lengths in characters without end: lognormal, at least 200, fixed seed."""
    rng = random.Random(5)
    sigma = math.sqrt(2 * math.log(MEAN / MEDIAN))
    while True:
        yield max(200, int(rng.lognormvariate(math.log(MEDIAN), sigma)))


def cut(pieces: Iterator[Piece], wanted: Iterator[int]) -> Iterator[Piece]:
    """Join the texts and yield (name, text) of documents.

    pieces: (name, text) of the texts.
    wanted: lengths of the documents in characters; each document extends to the next line end.

    A document's name consists of the name of the text that contains its end, and the position of
    the end in that text.
    """
    held: list[str] = []
    missing = next(wanted)
    for place, text in pieces:
        start = 0
        while start < len(text):
            end = text.find("\n", start + missing - 1) + 1 if start + missing <= len(text) else 0
            held.append(text[start : end or len(text)])
            missing -= len(held[-1])
            start += len(held[-1])
            if end:
                yield f"{place}#{start}", "".join(held)
                held, missing = [], next(wanted)
            elif missing < 1:
                missing = 1


def _listing(files: list[Path], root: Path | None) -> str:
    """Return a hash of the files' names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(root) if root else file
        digest.update(f"{name}:{file.stat().st_size};".encode("utf-8", "replace"))
    return digest.hexdigest()
