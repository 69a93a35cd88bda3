"""Verbs ``mirror`` and ``fetch``: copy the checkpoints of a run to an object store or file system
(fsspec) and back. The module does not import torch.

    URL/step_NNNNNNNN/...             files of a checkpoint, unchanged
    URL/step_NNNNNNNN/manifest.json   contains the XXH3 hash of every file; written last,
                                      after all other files were read back and compared
    URL/latest                        name of the newest checkpoint
    URL/run/...                       files of the run directory (metrics.jsonl, config.yaml, ...)
    URL/run/run_id.json               the run that owns this mirror; written first

A checkpoint that does not match the hashes in its manifest is never used. RUN_DIR/mirror.json
records the progress of the mirror; files that are already at the URL are not sent again, unless the
run has written their step again. While a checkpoint is sent, hard links preserve its files, so that
the run may delete it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from fem_common.errors import ConfigError, StorageError, convert_os_errors
from fem_common.files import locked, sync_file, write_atomically
from fem_common.stores import kind_of, message_of, open_store, until_it_works
from pretrain.checkpoint.folder import (
    HASHES,
    MANIFEST,
    MIRROR_STATE,
    damage,
    hash_of,
    hashes_of,
    newest_first,
    newest_good,
    refuse_newer,
)
from pretrain.checkpoint.mirroring import FETCHED, take_in
from pretrain.run_directory import RUN_ID
from tools.checkpoint.records import admit, bring_records, claim, send_records

HOLD = ".mirroring_"
LATEST = "latest"
# Bytes of one block of a file that is sent or read. S3 accepts at most 10,000 parts per file.
_BLOCK = 8 * 2**20
_PARTS = 9000
_AT_ONCE = 4  # files
_LOOK = 0.5  # seconds between two listings of the run directory


class Mirror:
    """The mirror of one run: a folder in an object store or file system."""

    def __init__(self, url: str, run_dir: Path | None = None) -> None:
        """Open the store. Raises ConfigError (see `stores.open_store`)."""
        self.fs, self.root, self.url = open_store(url, run_dir)

    def steps(self) -> list[str]:
        """Return the names of the complete checkpoints in the mirror, newest first. Raises any
        error of the store.
        """
        # No `exists` first: it would hide the reason if the store refuses the request.
        try:
            names = {Path(entry["name"]).name for entry in self.fs.ls(self.root, detail=True)}
        except FileNotFoundError:
            return []
        there = (name for name in sorted(names, reverse=True) if name.startswith("step_"))
        return [name for name in there if self.fs.exists(f"{self.root}/{name}/{MANIFEST}")]

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of the checkpoint ``name``. Raises ValueError if it is not valid."""
        manifest = json.loads(self.fs.cat_file(f"{self.root}/{name}/{MANIFEST}"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get(HASHES), dict):
            raise ValueError(f"{MANIFEST} is not the manifest of a mirrored checkpoint")
        return manifest

    def put(self, source: Path, name: str) -> str:
        """Send a file to ``name`` in the mirror, read it back, and return its XXH3 hash.

        Raises OSError if the stored content differs.
        """
        target = f"{self.root}/{name}"
        block_size = max(_BLOCK, source.stat().st_size // _PARTS)
        hashed = xxhash.xxh3_128()
        with (
            source.open("rb") as local,
            self.fs.open(target, "wb", block_size=block_size) as remote,
        ):
            while block := local.read(_BLOCK):
                hashed.update(block)
                remote.write(block)
        sent: str = hashed.hexdigest()
        if self.hash(name) != sent:
            raise OSError(f"{name} differs from the file that was sent")
        return sent

    def hash(self, name: str, take: Callable[[bytes], object] = lambda block: None) -> str:
        """Return the XXH3 hash of the stored file ``name``; ``take`` is called with every block
        read.
        """
        hashed = xxhash.xxh3_128()
        with self.fs.open(
            f"{self.root}/{name}", "rb", block_size=_BLOCK, cache_type="none"
        ) as remote:
            while block := remote.read(_BLOCK):
                hashed.update(block)
                take(block)
        found: str = hashed.hexdigest()
        return found

    def put_text(self, text: str, name: str) -> None:
        """Send a small text file in one request and read it back.

        Raises OSError if the stored content differs.
        """
        self.fs.pipe_file(f"{self.root}/{name}", text.encode())
        if self.fs.cat_file(f"{self.root}/{name}") != text.encode():
            raise OSError(f"{name} differs from the file that was sent")

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        folder = f"{self.root}/{name}"
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{folder}/{MANIFEST}")
        with suppress(FileNotFoundError):
            self.fs.rm(folder, recursive=True)


@dataclass
class _State:
    """Progress of a mirror; contents of RUN_DIR/mirror.json, except for two fields."""

    file: Path
    url: str
    newest: int | None = None  # newest step that is complete in the mirror
    # Files sent of incomplete checkpoints: checkpoint -> file -> hash. The hash of MANIFEST is that
    # of the local file: the run may have written the same step again since then.
    sent: dict[str, dict[str, str]] = field(default_factory=dict)
    fault: str | None = None  # error of the last attempt; None if it succeeded
    # Not in the file: local checkpoints that are damaged and therefore not sent.
    damaged: list[str] = field(default_factory=list)
    # Not in the file: True once the mirror has been checked not to belong to another run.
    looked_at: bool = False

    @classmethod
    def of(cls, run_dir: Path, url: str) -> _State:
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            written = json.loads((run_dir / MIRROR_STATE).read_text())
            typed = isinstance(written.get("newest"), int | None) and isinstance(
                written.get("sent", {}), dict
            )
            if typed and written.pop("url") == url:
                return cls(run_dir / MIRROR_STATE, url, **written)
        return cls(run_dir / MIRROR_STATE, url)

    def write(self) -> None:
        written = {"url": self.url, "newest": self.newest, "sent": self.sent, "fault": self.fault}
        write_atomically(self.file, json.dumps(written, indent=1) + "\n", synced=False)


def mirror(
    run_dir: Path, url: str, *, interval: int, keep_last: int | None, follow: bool, patience: float
) -> None:
    """Send the newest selected checkpoint of a run, unless it is already in the mirror.

    interval: only steps divisible by this number are sent, and always the last one. keep_last:
    number of checkpoints that remain in the mirror; None: all. follow: continue with each newer
    checkpoint until stdin ends. patience: seconds for which failures are retried. With ``follow``,
    failures are retried without a limit while stdin is open, and for ``patience`` seconds
    afterwards.

    Raises:
        ConfigError: the URL is invalid, or the mirror belongs to another run.
        StorageError: sending failed for ``patience`` seconds.
    """
    place = Mirror(url, run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory")
    # The mirror process of a previous attempt may still run: its stdin has ended, so it ends soon.
    with convert_os_errors(), locked(run_dir / ".mirror.lock", wait=True):
        state = _State.of(run_dir, place.url)
        for left in (run_dir / "checkpoints").glob(f"{HOLD}*"):
            shutil.rmtree(left, ignore_errors=True)
        # An unreadable store is reported later, when a checkpoint is sent.
        with suppress(Exception):
            if state.newest is not None and f"step_{state.newest:08d}" not in place.steps():
                state.newest = None
        retry = _Retry(state)

        def send(last: bool = False) -> None:
            # Searched at every attempt: the run may have deleted the previous one.
            step = _next(run_dir, state, 1 if last else interval)
            if step or not state.looked_at:
                claim(place, run_dir, step)
                state.looked_at = True
            if step:
                try:
                    _send(place, state, step, keep_last)
                except _DamagedHere as error:
                    print(f"mirror {place.url}: {error}", flush=True)
                    state.damaged.append(step.name)
                    place.remove(step.name)
                    send(last)
            if last or step:
                send_records(place, run_dir)

        while follow:
            waiting = not state.looked_at or _next(run_dir, state, interval)
            follow = not (retry.until(send, _stdin_ends) if waiting else _stdin_ends(_LOOK))
        end = time.monotonic() + patience
        failed = retry.until(lambda: send(last=True), lambda pause: _over(pause, end))
        if failed:
            later = (
                f"the local copy is complete; python -m tools.checkpoint mirror {run_dir} {url}"
                " sends it later"
            )
            raise kind_of(failed)(
                f"the newest checkpoint of {run_dir} is not in {url}: {state.fault}; {later}"
            )
    if state.damaged:
        raise StorageError(
            f"{run_dir}: {', '.join(state.damaged)} is damaged in the run directory and was not"
            f" sent to {url}"
        )


def fetch(
    run_dir: Path, url: str, *, patience: float, damaged: Collection[str] = (), aside: bool = False
) -> None:
    """Copy the newest valid checkpoint of a mirror into the run directory.

    It is copied only if it is newer than all valid checkpoints of the run. A run directory without
    checkpoints takes over the run of the mirror.

    patience: seconds for which failures are retried. damaged: names of checkpoints of the run that
    do not count as valid. aside: the run itself fetches, so the mirror must belong to this run
    directory; a checkpoint that may belong to another run remains in the folder FETCHED.

    Raises:
        ConfigError: the URL is invalid, or the mirror belongs to another run; without ``aside``,
        neither the mirror nor the run directory has a checkpoint.
        StorageError: the run directory has no valid checkpoint, and the mirror cannot be read or
        contains only damaged ones.
    """
    place = Mirror(url, run_dir)
    folder = run_dir / "checkpoints"
    wrong: dict[str, str] = {}
    with convert_os_errors():
        here = None
        if folder.is_dir():
            here = newest_good(folder, dict.fromkeys((folder / name for name in damaged), ""))
        newest = here.path.name if here else ""
        state = _State(run_dir / MIRROR_STATE, place.url)
        end = time.monotonic() + patience
        retry = _Retry(state, write=False)
        failed = retry.until(
            lambda: _fetch_newest(place, run_dir, newest, wrong, aside=aside),
            lambda pause: _over(pause, end),
        )
    if failed and here is None:
        raise kind_of(failed)(
            f"{url} cannot be read, and {folder} has no valid checkpoint: {state.fault}"
        )
    if wrong and here is None:
        listed = ", ".join(f"{name}: {what}" for name, what in wrong.items())
        raise StorageError(
            f"no checkpoint in {url} is valid ({listed}), {folder} has none, and the run does not"
            " start from step 0 over them; if the store had a temporary fault, repeat the same"
            " command later; to start from step 0, name another mirror"
        )
    if not (failed or aside or here or folder.is_dir()):
        raise ConfigError(f"{url} contains no checkpoint: nothing was fetched; check the address")
    if failed:
        print(
            f"{url} cannot be read ({state.fault}): it may contain a newer checkpoint than"
            f" {here.path if here else ''}",
            flush=True,
        )


def _fetch_newest(
    place: Mirror, run_dir: Path, newest_here: str, wrong: dict[str, str], *, aside: bool
) -> None:
    """Fetch the newest valid checkpoint of the mirror if it is newer than all valid ones of the
    run.

    wrong: receives name -> fault of the skipped checkpoints if no checkpoint of the mirror is
    valid.
    """
    fetched, (adopted, known) = run_dir / FETCHED, admit(place, run_dir, by_run=aside)
    shutil.rmtree(fetched, ignore_errors=True)
    fetched.mkdir(parents=True)
    wrong.clear()
    steps = place.steps()
    if not steps and not newest_here and place.fs.exists(f"{place.root}/{LATEST}"):
        wrong[LATEST] = "the checkpoint that it names does not exist"
    for name in steps:
        if name <= newest_here:
            break
        began = time.monotonic()
        (fetched / name).mkdir()
        damaged = refuse_newer(f"{place.url}/{name}", _bring(place, name, fetched / name))
        if damaged is None:
            wrong.clear()
            bring_records(place, fetched)
            print(
                f"checkpoint {name} copied from {place.url} ({time.monotonic() - began:.1f} s)",
                flush=True,
            )
            break
        shutil.rmtree(fetched / name)
        wrong[name] = damaged
        print(f"checkpoint {place.url}/{name} is damaged ({damaged}); passing over it", flush=True)
    if adopted and not wrong:
        write_atomically(fetched / RUN_ID, adopted)
    if not aside or known or not newest_first(fetched):
        take_in(run_dir)


def _bring(place: Mirror, name: str, into: Path) -> str | None:
    """Copy the files of the checkpoint ``name`` to ``into``. Return its fault, or None if it is
    valid.
    """

    def take(file: str) -> str:
        with (into / file).open("wb") as local:
            return place.hash(f"{name}/{file}", local.write)

    wrong, manifest = _compared(place, name, take)
    if wrong is not None:
        return wrong
    for file in manifest[HASHES]:
        sync_file(into / file)
    write_atomically(into / MANIFEST, json.dumps(manifest, indent=1))
    return damage(into)


def _compared(
    place: Mirror, name: str, hash_of: Callable[[str], str]
) -> tuple[str | None, dict[str, Any]]:
    """Compare all files of a mirrored checkpoint with the hashes in its manifest.

    hash_of: function that reads a file of the checkpoint and returns its hash.

    Returns:
        The fault, or None if the checkpoint is valid; and its manifest, {} if it cannot be read.
    """
    manifest: dict[str, Any] = {}
    try:
        manifest = place.manifest(name)
        for file, expected in manifest[HASHES].items():
            missing = file
            if Path(file).name != file:
                return f"{MANIFEST} names {file}", manifest
            if hash_of(file) != expected:
                return f"{file} does not match its hash", manifest
    except FileNotFoundError:
        return f"{missing if manifest else MANIFEST} is missing", manifest
    except ValueError as error:
        return str(error), manifest
    return None, manifest


def verify_mirror(url: str) -> bool:
    """Read all checkpoints of a mirror, compare them with their hashes, and print the result.

    Return True if all are valid.

    Raises:
        ConfigError: the URL is invalid or contains no checkpoint.
        StorageError: the mirror cannot be read.
    """
    place = Mirror(url)
    good = True
    try:
        names = place.steps()
        if not names:
            raise ConfigError(f"{url}: no checkpoint found")
        for name in names:
            wrong, manifest = _compared(place, name, partial(_hash, place, name))
            size = sum(manifest.get("files", {}).values())
            if wrong:
                print(f"{url}/{name}: damaged: {wrong}")
            else:
                count = len(manifest[HASHES])
                print(f"{url}/{name}: undamaged, {size / 1e9:.2f} GB in {count} files")
            good = good and wrong is None
    except ConfigError:
        raise
    except Exception as error:  # the file systems of fsspec share no base class of errors
        raise kind_of(error)(f"{url} cannot be read: {message_of(error)}") from None
    return good


def _hash(place: Mirror, name: str, file: str) -> str:
    """Return the hash of a file of the checkpoint ``name`` in the mirror."""
    return place.hash(f"{name}/{file}")


def _send(place: Mirror, state: _State, step: Path, keep_last: int | None) -> None:
    began = time.monotonic()
    with _held(step) as folder:
        manifest = json.loads((folder / MANIFEST).read_text())
        hashes = hashes_of(folder)
        version = hash_of(folder / MANIFEST)
        sent = state.sent.get(step.name, {})
        if sent.get(MANIFEST) != version:  # files of an earlier checkpoint of this step
            sent = state.sent[step.name] = {MANIFEST: version}
        files = [
            name
            for name in manifest["files"]
            if not _is_there(place, f"{step.name}/{name}", folder / name, name in sent)
        ]

        def put(name: str) -> None:
            hashed = place.put(folder / name, f"{step.name}/{name}")
            if hashed != hashes.get(name, hashed):
                raise _DamagedHere(
                    f"{step}: {name} does not match the hash taken while it was written; it is not"
                    " sent"
                )
            sent[name] = hashed

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for _ in pool.map(put, files):
                    state.write()
            finally:
                pool.shutdown(cancel_futures=True)
        manifest[HASHES] = {name: sent[name] for name in manifest["files"]}
        place.put_text(json.dumps(manifest, indent=1), f"{step.name}/{MANIFEST}")
        place.put_text(step.name + "\n", LATEST)
    if keep_last is not None:
        for old in place.steps()[keep_last:]:
            place.remove(old)
    state.newest = int(step.name.removeprefix("step_"))
    state.sent = {}
    state.fault = None
    state.write()
    print(
        f"checkpoint {step.name} is in {place.url} ({time.monotonic() - began:.1f} s)", flush=True
    )


def _is_there(place: Mirror, name: str, local: Path, was_sent: bool) -> bool:
    try:
        return was_sent and place.fs.info(place.root + "/" + name)["size"] == local.stat().st_size
    except FileNotFoundError:
        return False


def _next(run_dir: Path, state: _State, interval: int) -> Path | None:
    """Return the folder of the checkpoint to send next, or None.

    It is the newest checkpoint of the run that is valid, of a step divisible by ``interval``, and
    newer than the newest one in the mirror.
    """
    for path in newest_first(run_dir / "checkpoints"):
        step = int(path.name.removeprefix("step_"))
        if state.newest is not None and step <= state.newest:
            return None
        wanted = step % interval == 0 and path.name not in state.damaged
        if wanted and damage(path) is None:
            return path
    return None


class _DamagedHere(Exception):
    """Error raised before sending: a local file does not match its hash."""


@contextmanager
def _held(step: Path) -> Iterator[Path]:
    """Context manager: yield a folder with hard links to the files of a checkpoint.

    The links preserve the files if the run deletes the checkpoint meanwhile. If links are not
    supported, the folder of the checkpoint itself is yielded.
    """
    folder = step.with_name(f"{HOLD}{step.name}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(step, folder, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(folder, ignore_errors=True)
        yield step
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Retry:
    """Retry operations of a mirror; print and record each new fault once, not at every attempt."""

    def __init__(self, state: _State, *, write: bool = True) -> None:
        self.state, self.write = state, write

    def until(self, work: Callable[[], object], over: Callable[[float], bool]) -> Exception | None:
        """Run ``work`` until it succeeds, then return None; if it is given up, return the last
        error.

        over: function that is called after a failure with the seconds to pause; it waits and
        returns True to give up.
        """
        return until_it_works(work, over, self._note)

    def _note(self, fault: str | None) -> None:
        if fault == self.state.fault:
            return
        if fault is not None:
            print(f"mirror {self.state.url}: {fault}; trying again", flush=True)
        self.state.fault = fault
        if self.write:
            self.state.write()


def _stdin_ends(seconds: float) -> bool:
    """Wait for at most ``seconds``. Return True if stdin has ended."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def _over(pause: float, end: float) -> bool:
    time.sleep(max(0.0, min(pause, end - time.monotonic())))
    return time.monotonic() >= end
