"""``python -m pretrain.data.store_client bring|serve``: client process for data in stores.

``bring CACHE PATIENCE KEY=URL...`` copies the files that are read before training: manifests,
tokenizers, .idx files, a sample of each .bin and .mask. ``serve CACHE PATIENCE BYTES URL...``
answers requests for ranges of the .bin and .mask files in their order, until its parent process
ends. The module does not import torch.

A .bin's blocks are cached at their offset in a sparse file, with a table of their hashes in a
second file. A block counts only if its hash is correct, so that kills, damage and several writers
need no lock. The set of blocks that may be cached is fixed: with samples in random order any set
saves as much as another of its size, and evicting blocks for newer ones saves no requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

import xxhash

from fem_common.cli import run
from fem_common.errors import MISTAKES, CommandError, ConfigError, StorageError, convert_os_errors
from fem_common.files import (
    locked,
    make_folder,
    remove_leftovers,
    sha256,
    temporary,
    write_atomically,
)
from fem_common.progress import Progress
from fem_common.stores import message_of, open_store, until_it_works
from pretrain.data.facts import SAMPLE_BLOCKS, read_manifest, sample_digest, sample_ranges
from pretrain.data.store_cache import CLIENT, local_prefix

BLOCK = 1 << 16
REQUEST = struct.Struct("<IQQ")  # number of the file (see `serve`), offset, length
ANSWER = struct.Struct("<?Q")  # True: bytes follow, False: an error text; its length
_HASH = 8
_GOLDEN = 0x9E3779B97F4A7C15  # golden ratio, as a fraction of 2**64
_AT_ONCE = 16
_PIECE = 8 * 2**20  # bytes of an .idx per request
_SPARSE = (".bin", ".mask")  # files of which only parts are copied
_KNOWN = "brought.json"
_MANIFEST = "manifest.json"
# Signals that only the rank handles.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Answer = TypeVar("Answer")


class ObjectStore:
    """An object store's folder that contains the files of a source.

    A failing request is retried for ``patience`` seconds. The first failure and the recovery are
    each logged once.
    """

    def __init__(self, url: str, patience: float) -> None:
        """Open the store. Raises ConfigError (see `open_store`)."""
        self.url = url
        self.patience = patience
        self.folder = url.rpartition("/")[0]
        self.fs, self.root, _ = open_store(self.folder)
        self.failing, self.lock = set[int](), threading.Lock()

    def insist(self, work: Callable[[], Answer]) -> Answer:
        """Return the result of ``work``; call it again for ``patience`` seconds if it fails.

        Raises:
            StorageError: it still fails after ``patience`` seconds.
            ConfigError: raised by ``work``.
        """
        done = list[Answer]()
        me = threading.get_ident()
        fault = ""
        end = 0.0

        def note(why: str | None) -> None:
            nonlocal fault, end
            with self.lock:
                before = bool(self.failing)
                if why is None:
                    self.failing.discard(me)
                else:
                    end = end or time.monotonic() + self.patience
                    fault = why
                    self.failing.add(me)
                if bool(self.failing) != before:
                    print(
                        f"{self.url}: {f'{fault}; trying again' if why else 'is read again'}",
                        file=sys.stderr,
                        flush=True,
                    )

        def over(pause: float) -> bool:
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            return time.monotonic() >= end

        if until_it_works(lambda: done.append(work()), over, note):
            raise StorageError(f"{self.url} cannot be read: {fault}")
        return done[0]

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of a file."""

        def work() -> bytes:
            content: bytes = self.fs.cat_file(f"{self.root}/{name}", start=start, end=end)
            if len(content) != end - start:
                raise OSError(f"received {len(content)} bytes of {name} instead of {end - start}")
            return content

        return self.insist(work)


class Blocks:
    """A .bin or .mask file in a store, of which about ``allowed`` blocks may be cached in the file
    ``local``.
    """

    def __init__(self, store: ObjectStore, local: str, allowed: int) -> None:
        self.store, self.name = store, Path(local).name
        self.held = os.open(local, os.O_RDWR)
        self.table = os.open(f"{local}.blocks", os.O_RDWR | os.O_CREAT, 0o666)
        self.size = os.fstat(self.held).st_size
        self.count, self.allowed = blocks_of(self.size), allowed

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, from cached blocks as far as possible.

        Raises StorageError if the store does not answer.
        """
        first, end = offset // BLOCK, offset + length
        span = bytearray()
        missing = list[int]()
        wanted = list[list[int]]()
        for number in range(first, blocks_of(end)):
            start, content = number * BLOCK, self._kept(number)
            low, high = start, min(start + BLOCK, self.size)
            span += content or bytes(high - low)
            if content is not None:
                continue
            if may_keep(number, self.allowed, self.count):
                missing.append(number)
            else:
                low, high = max(low, offset), min(high, end)
            if wanted and wanted[-1][1] == low:
                wanted[-1][1] = high
            else:
                wanted.append([low, high])
        base = first * BLOCK
        for low, high in wanted:
            span[low - base : high - base] = self.store.fetch(self.name, low, high)
        for number in missing:
            self._keep(number, bytes(span[number * BLOCK - base : (number + 1) * BLOCK - base]))
        return bytes(span[offset - base : end - base])

    def _kept(self, number: int) -> bytes | None:
        mark = os.pread(self.table, _HASH, number * _HASH)
        if len(mark) < _HASH or not any(mark):
            return None
        content = os.pread(self.held, BLOCK, number * BLOCK)
        return content if xxhash.xxh3_64_digest(content) == mark else None

    def _keep(self, number: int, content: bytes) -> None:
        with suppress(OSError):  # full or read-only disk: the block is requested again
            os.pwrite(self.held, content, number * BLOCK)
            os.pwrite(self.table, xxhash.xxh3_64_digest(content), number * _HASH)


def blocks_of(size: int) -> int:
    """Return the number of blocks that ``size`` bytes need."""
    return -(-size // BLOCK)


def may_keep(number: int, allowed: int, count: int) -> bool:
    """Return True if block ``number`` of a file with ``count`` blocks may be cached.

    The ``allowed`` blocks are spread evenly (multiples of the golden ratio), and a smaller set is a
    subset of a larger one.
    """
    return number * _GOLDEN % 2**64 * count < allowed << 64


def shares(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the number of blocks of each .bin that may be cached.

    sizes: bytes of each .bin. capacity: bytes that all files together may use. The space for
    samples and hash tables is subtracted first.
    """
    counts = [blocks_of(size) for size in sizes]
    spare = (capacity - len(sizes) * (SAMPLE_BLOCKS + 4) * BLOCK - sum(counts) * _HASH) // BLOCK
    return [min(count, count * max(spare, 0) // max(sum(counts), 1)) for count in counts]


def serve(cache: Path, patience: float, capacity: int, urls: Sequence[str]) -> None:
    """Answer the requests that arrive on stdin, in their order, on stdout. Does not return.

    The files of URL number n have the numbers 2n (.bin) and 2n + 1 (.mask, if it exists).
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = SimpleQueue["Future[bytes]"]()
    pool = ThreadPoolExecutor(_AT_ONCE)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    threading.Thread(target=_answer, args=(answers, out), daemon=True).start()
    local = [local_prefix(url, cache) + ending for url in urls for ending in _SPARSE]
    there = [number for number, file in enumerate(local) if os.path.isfile(file)]
    kept = shares([os.path.getsize(local[number]) for number in there], capacity)
    files = {
        number: Blocks(ObjectStore(urls[number // 2], patience), local[number], allowed)
        for number, allowed in zip(there, kept, strict=True)
    }
    while request := sys.stdin.buffer.read(REQUEST.size):
        number, offset, length = REQUEST.unpack(request)
        answers.put(pool.submit(files[number].read, offset, length))
    os._exit(0)  # unfinished requests are not needed


def _end_with(parent: int) -> None:
    """End this process when its parent process ends.

    The end of stdin is not sufficient, since a writer process that the rank forked keeps the other
    end of the pipe open.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _answer(answers: SimpleQueue[Future[bytes]], out: BinaryIO) -> None:
    """Write the answers to ``out`` in the order of the requests, until its reader closes."""
    with suppress(BrokenPipeError):
        while True:
            try:
                right, content = True, answers.get().result()
            except Exception as error:
                known = isinstance(error, CommandError)
                text = str(error) if known else f"{type(error).__name__}: {error}"
                right, content = False, text.encode()
            out.write(ANSWER.pack(right, len(content)) + content)
            out.flush()
    os._exit(0)


class Source:
    """The files of a source, with their versions in the store and their local copies."""

    def __init__(self, key: str, url: str, cache: Path, patience: float) -> None:
        self.title = f"{key} = {url}"
        self.store = ObjectStore(url, patience)
        self.name = url.rpartition("/")[2]
        self.folder = Path(local_prefix(url, cache)).parent

    def bring(self) -> None:
        """Copy every file whose local copy is missing or outdated.

        Raises ConfigError, StorageError.
        """
        names = (_MANIFEST, *(f"{self.name}{ending}" for ending in (".idx", *_SPARSE)))
        there = {
            name: self.store.insist(lambda name=name: self._query(name))  # type: ignore[misc]
            for name in names
        }
        make_folder(self.folder)
        if all(self._is_here(name, info) for name, info in there.items()):
            return
        with convert_os_errors(), locked(self.folder / ".lock", wait=True):
            remove_leftovers(self.folder)
            for name, info in there.items():
                if not self._is_here(name, info):
                    self._fetch(name, info)
                    known = {**self._known(), name: _mark(info)}
                    if name.endswith(_SPARSE) and info:
                        known[f"{name} sample"] = sample_digest(self.folder / name)
                    write_atomically(self.folder / _KNOWN, json.dumps(known, indent=1))

    def _query(self, name: str) -> Mapping[str, Any]:
        """Return the store's information about a file; {} for a missing manifest or mask."""
        try:
            info: Mapping[str, Any] = self.store.fs.info(f"{self.store.root}/{name}")
        except Exception as error:
            if isinstance(error, FileNotFoundError) and name.endswith((_MANIFEST, ".mask")):
                return {}
            if isinstance(error, MISTAKES) or type(error).__name__.endswith("CredentialsError"):
                what = "not found" if isinstance(error, FileNotFoundError) else message_of(error)
                raise ConfigError(f"{self.title}: {self.store.folder}/{name}: {what}") from None
            raise
        return info

    def _known(self) -> dict[str, str]:
        """Return file name -> mark that the file had when it was copied (see `_mark`).

        For a .bin or .mask, the result also contains the digest of its sample. It is {} without
        valid copies.
        """
        with suppress(OSError, ValueError):
            known = json.loads((self.folder / _KNOWN).read_text())
            return known if isinstance(known, dict) else {}
        return {}

    def _is_here(self, name: str, info: Mapping[str, Any]) -> bool:
        return self._is_the_same(name, info) and (
            not name.endswith(_SPARSE)
            or not info
            or sample_digest(self.folder / name) == self._known().get(f"{name} sample")
        )

    def _is_the_same(self, name: str, info: Mapping[str, Any]) -> bool:
        """Return True if the local copy's mark and size match the store's file."""
        file = self.folder / name
        return self._known().get(name) == _mark(info) and (
            file.stat().st_size if file.is_file() else None
        ) == info.get("size")

    def _fetch(self, name: str, info: Mapping[str, Any]) -> None:
        """Copy a file completely; of a .bin or .mask copy only the sample, with holes for the rest.

        If only the sample of an existing one is damaged, the file is repaired in place, so that
        its cached blocks remain.
        """
        file = self.folder / name
        sparse = name.endswith(_SPARSE)
        size = info.get("size")
        if size is None:
            file.unlink(missing_ok=True)
            return
        kept = sparse and self._is_the_same(name, info)
        target = file if kept else temporary(file)
        pieces = [(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]
        self._write(name, target, size, sample_ranges(size) if sparse else pieces)
        if name == f"{self.name}.idx":
            manifest = read_manifest(self.folder / _MANIFEST)
            recorded = manifest.splits.get(self.name, {}).get("idx_sha256") if manifest else None
            if recorded not in (None, sha256(target)):
                raise ConfigError(
                    f"{self.title}: its .idx is not the one that the {_MANIFEST} next to it "
                    "records; upload both again"
                )
        if not kept:
            Path(f"{file}.blocks").unlink(missing_ok=True)
            os.replace(target, file)
        if name == _MANIFEST:
            self._fetch_tokenizer()

    def _fetch_tokenizer(self) -> None:
        manifest = read_manifest(self.folder / _MANIFEST)
        path = PurePosixPath(manifest.tokenizer["path"] if manifest else "/")
        if path.is_absolute() or ".." in path.parts:
            return  # not below the source folder

        def listed() -> list[dict[str, Any]]:
            with suppress(FileNotFoundError):
                return [
                    entry
                    for entry in self.store.fs.ls(f"{self.store.root}/{path}", detail=True)
                    if entry["type"] == "file"
                ]
            return []

        make_folder(self.folder / path)
        for entry in self.store.insist(listed):
            self._fetch(f"{path}/{Path(entry['name']).name}", entry)

    def _write(self, name: str, target: Path, size: int, parts: Sequence[tuple[int, int]]) -> None:
        """Fetch the ranges ``parts`` of a file and write them to ``target``.

        The rest of the ``size`` bytes of ``target`` remains a hole.
        """
        quiet = os.environ.get("LOCAL_RANK", "0") != "0"
        title = f"{self.store.folder}/{name}"
        progress = Progress(
            sum(end - start for start, end in parts), "B", title, quiet=quiet, every=10.0
        )
        with (
            progress,
            target.open("r+b" if target.exists() else "w+b") as local,
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            local.truncate(size)
            for count in pool.map(
                lambda part: os.pwrite(local.fileno(), self.store.fetch(name, *part), part[0]),
                parts,
            ):
                progress.advance(count)
            os.fsync(local.fileno())


def _mark(info: Mapping[str, Any]) -> str:
    """Return a hash of the store's information about a file.

    The hash changes when the file is replaced in the store.
    """
    return hashlib.sha256(str(sorted(info.items())).encode()).hexdigest()[:16]


def main(words: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    verb, cache, patience, *rest = words

    def work() -> None:
        if verb == "serve":
            serve(Path(cache), float(patience), int(rest[0]), rest[1:])
        for key, _, url in (named.partition("=") for named in rest):
            Source(key, url, Path(cache), float(patience)).bring()

    return run(CLIENT, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
