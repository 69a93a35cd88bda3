"""Access to datasets on the Hugging Face Hub: lists of files and reading of files.

All files are read at one commit. An address is
``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, where PATH is a file, a folder or a glob. Without
PATH, the files are those of a subset that the front matter of the dataset's card defines
(``configs``: ``config_name``, ``data_files``).
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import yaml

from data_prep.aliases import Json
from data_prep.sources.hub_client import LONG_WAITS, SHORT_WAITS, Repository, patiently
from data_prep.sources.names import is_data, report_left_out
from fem_common.errors import UserError
from fem_common.text import first_few, one_line

SCHEME = "hf://"

_ADDRESS = re.compile(
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class RemoteFile:
    """File on the Hub.

    url: ``hf://datasets/OWNER/NAME@COMMIT/PATH``.
    bytes: size of the file.
    etag: hash of the content: ``sha256:…`` for a large file, else ``git:…``.
    """

    url: str
    bytes: int
    etag: str


def is_hub(address: str) -> bool:
    """Return True if an input is an address on the Hub rather than a local path."""
    return address.startswith(SCHEME)


def resolve(url: str, subset: str | None = None) -> list[RemoteFile]:
    """Return the files of an address, sorted by path.

    The URLs of the files contain the current commit of the address's revision. ``subset`` is a
    subset of the dataset's card. Raises UserError for a wrong address or subset.
    """
    repository, path = _parse(url)
    if path and subset is not None:
        raise UserError(f"{url} names a path and --subset {subset} another; give one of them")
    pinned = Repository(repository.kind, repository.id, _commit(repository))
    found = _at_path(pinned, path) if path else _of_subset(pinned, subset)
    return [
        RemoteFile(f"hf://datasets/{pinned.id}@{pinned.revision}/{name}", *found[name])
        for name in sorted(found, key=_parts)
    ]


def open_remote(url: str, *, ahead: bool = False) -> BinaryIO:
    """Open a file at a URL returned by ``resolve`` for random access.

    If ``ahead``, large blocks are used and the next blocks are read in the background, which is
    fast if much of the file is read.
    """
    repository, path = _parse(url)
    if not path:
        raise UserError(f"{url} names no file")
    return cast(BinaryIO, HubFile(repository, path, ahead=ahead))


class HubFile(io.RawIOBase):
    """Read-only file at one commit, opened with the file system of huggingface_hub.

    After a failed read, the file is reopened and reading continues at the same position. Failures
    raise CommandError instead of OSError, so that a reader can distinguish a broken network from a
    damaged file.
    """

    def __init__(self, repository: Repository, path: str, *, ahead: bool = False) -> None:
        super().__init__()
        self.name = f"{repository}/{path}"
        self._repository = repository
        self._path = path
        self._ahead = ahead
        self._place, self._file = 0, None
        self._size: int = self._patiently(lambda file: file.size)

    def _patiently(self, ask: Callable[[Any], Any]) -> Any:
        def attempt() -> Any:
            self._file = self._file or self._open()
            try:
                return ask(self._file)
            except BaseException:
                self._file = None  # its cache may contain the failure
                raise

        return patiently(attempt, self._repository, LONG_WAITS)

    def _open(self) -> Any:
        from huggingface_hub import HfFileSystem

        kind, block, blocks = (
            ("background", 8 << 20, 4) if self._ahead else ("blockcache", 1 << 18, 8)
        )
        where = (
            f"{self._repository.kind}s/{self._repository.id}@{self._repository.revision}"
            f"/{self._path}"
        )
        file = HfFileSystem().open(
            where, block_size=block, cache_type=kind, cache_options={"maxblocks": blocks}
        )
        address, fetch = file.url(), file.cache.fetcher
        file.url = lambda: address  # file.url() requests the file's metadata at each call

        def fetch_exactly(start: int, end: int) -> bytes:
            data: bytes = fetch(start, end := min(end, file.size))
            if len(data) != end - start:
                came = f"{len(data)} bytes of {self._path} received, {end - start} requested"
                raise UserError(f"{self._repository}: {came}; first {self._repository.download}")
            return data

        file.cache.fetcher = fetch_exactly
        return file

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[
            whence
        ] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer``, at most to the end of the file, and return the number of bytes."""
        target = memoryview(buffer).cast("B")
        start, size = self._place, max(0, min(len(target), self._size - self._place))

        def read(file: Any) -> bytes:
            file.seek(start)
            return bytes(file.read(size))

        target[:size] = self._patiently(read) if size else b""
        self._place += size
        return size


def _parse(url: str) -> tuple[Repository, str]:
    match = _ADDRESS.fullmatch(url)
    if match is None:
        near = f"hf://datasets/{url.removeprefix(SCHEME)}"
        hint = (
            f"did you mean {near}?"
            if _ADDRESS.fullmatch(near) and not url.startswith("hf://datasets/")
            else "see data_prep/README.md"
        )
        raise UserError(
            f"{url} is not of the form hf://datasets/OWNER/NAME[@REVISION][/PATH]; {hint}"
        )
    revision = match["revision"]
    return Repository("dataset", match["id"], unquote(revision) if revision else None), (
        match["path"] or ""
    ).strip("/")


def _parts(path: str) -> list[str]:
    return path.split("/")


def _commit(repository: Repository) -> str:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    def ask() -> str:
        found = HfApi().dataset_info(
            repository.id,
            revision=repository.revision,
            expand=["sha"],
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        return str(found.sha)

    try:
        commit = patiently(ask, repository, SHORT_WAITS)
    except HFValidationError as error:
        raise UserError(
            f"{repository.id} is not a valid dataset name ({one_line(error).rstrip('.')})"
        ) from None
    except (ValueError, KeyError, TypeError):  # the response is a web page or other JSON
        commit = ""
    if re.fullmatch(r"[0-9a-f]{40,64}", commit) is None:
        raise UserError(
            f"{repository}: {constants.ENDPOINT} does not answer like a Hugging Face Hub; "
            "check HF_ENDPOINT"
        )
    return commit


# --- files ----------------------------------------------------------------------------------------

Files = dict[str, tuple[int, str]]  # path -> bytes, etag


def _file(entry: Any) -> tuple[int, str]:
    return (
        (entry.lfs.size, f"sha256:{entry.lfs.sha256}")
        if entry.lfs is not None
        else (entry.size, f"git:{entry.blob_id}")
    )


def _entry(repository: Repository, path: str) -> Files | None:
    """Return {path: file} if ``path`` is a file, {} if it is a folder, or None if it is missing."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def ask() -> Files | None:
        entries = HfApi().get_paths_info(
            repository.id, [path], revision=repository.revision, repo_type="dataset"
        )
        if not entries:
            return None
        return {entry.path: _file(entry) for entry in entries if isinstance(entry, RepoFile)}

    return patiently(ask, repository, SHORT_WAITS)


def _listed(repository: Repository, folder: str) -> Files:
    """Return all files below a folder by their paths, or {} if the folder does not exist.

    The folder "" is the entire repository.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    def ask() -> Files:
        try:
            entries = list(
                HfApi().list_repo_tree(
                    repository.id,
                    folder or None,
                    recursive=True,
                    revision=repository.revision,
                    repo_type="dataset",
                )
            )
        except EntryNotFoundError:
            return {}
        return {entry.path: _file(entry) for entry in entries if isinstance(entry, RepoFile)}

    return patiently(ask, repository, SHORT_WAITS)


def _readable(repository: Repository, files: Files) -> Files:
    """Return the data files among ``files``, and list all other files on stderr.

    Other files are for example cards, licences and pictures.
    """
    found = {path: file for path, file in files.items() if is_data(path)}
    if found:
        report_left_out(str(repository), [path for path in files if path not in found])
    return found


def _at_path(repository: Repository, path: str) -> Files:
    """Return the files that ``path`` selects.

    These are a file, the data files of a folder, or the matches of a glob. Raises UserError if no
    file is found.
    """
    name = f"{repository.kind} {repository.id}"
    if glob.has_magic(path):
        if not (found := _matching(repository, [path])):
            raise UserError(f"{name} has no file that matches {path!r}")
        return found
    file = _entry(repository, path)
    if file is None:
        raise UserError(f"{name} has no {path!r}; {_near_paths(repository, path)}")
    if not (found := file or _readable(repository, _listed(repository, path))):
        raise UserError(f"{name} has no .parquet, .jsonl, .jsonl.gz or .jsonl.zst file in {path!r}")
    return found


def _near_paths(repository: Repository, path: str) -> str:
    names = _listed(repository, "")
    known = {
        "/".join(_parts(name)[:depth])
        for name in names
        for depth in range(1, len(_parts(name)) + 1)
    }
    near = difflib.get_close_matches(path, known, n=3)
    top = sorted({_parts(name)[0] for name in names if "/" in name})
    return (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"it has the folders: {', '.join(top[:20])}"
    )


def _matching(repository: Repository, patterns: Iterable[str]) -> Files:
    """Return the files of a repository that match at least one of the globs ``patterns``.

    The rules are those of Python's glob: ``*`` matches within a name, ``**`` any folders, and
    hidden names do not match.
    """
    found: Files = {}
    for pattern in patterns:
        parts = _parts(pattern)
        fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
        files = _listed(repository, "/".join(parts[:fixed]))
        found |= {path: file for path, file in files.items() if _matches(_parts(path), parts)}
    return found


def _matches(path: list[str], pattern: list[str]) -> bool:
    if not pattern or not path:
        return not pattern and not path
    hidden = path[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        # The rest of the path is a file name, and the rest of the pattern matches any name.
        inside = len(path) == 1 and set(pattern) == {"**"}
        return _matches(path, pattern[1:]) or (
            not hidden and (inside or _matches(path[1:], pattern))
        )
    return (
        not hidden and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
    )


# --- subsets --------------------------------------------------------------------------------------


def _of_subset(repository: Repository, subset: str | None) -> Files:
    """Return the files of a subset that the dataset's card defines.

    If ``subset`` is None, the default subset is used. If the card defines no subsets, return the
    data files of the entire repository.
    """
    configs = _configs(repository)
    name = f"{repository.kind} {repository.id}"
    if not configs:
        if subset is not None:
            raise UserError(
                f"{name} names no subsets in its card; give a folder instead: "
                f"hf://datasets/{repository.id}/FOLDER"
            )
        found = _training(repository, _readable(repository, _listed(repository, "")))
    else:
        config = configs[_chosen(name, configs, subset)]
        folder = str(config.get("data_dir") or "").strip("/")
        patterns = [
            f"{folder}/{pattern}" if folder else pattern
            for pattern in _patterns(config.get("data_files"))
        ]
        if patterns:
            matching = _matching(repository, patterns)
            # Files without a known suffix are kept: their kind is detected from the content.
            found = _readable(repository, matching) or matching
        else:
            found = _training(repository, _readable(repository, _listed(repository, folder)))
    if not found:
        raise UserError(
            f"{name}{f', subset {subset}' if subset else ''} has no .parquet, .jsonl, "
            ".jsonl.gz or .jsonl.zst file"
        )
    return found


def _configs(repository: Repository) -> dict[str, Json]:
    """Return the subsets in the card's front matter, a dictionary from config_name to its entry.

    The result is empty if the repository has no card or the card has no ``configs``.
    """
    if not _entry(repository, "README.md"):
        return {}
    with HubFile(repository, "README.md") as file:
        card = file.read().decode("utf-8", errors="replace")
    front = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", card, re.DOTALL)
    try:
        data = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError as error:
        problem = one_line(getattr(error, "problem", None) or error)
        raise UserError(
            f"{repository}: the front matter of its README.md is not YAML ({problem}); give "
            "a path instead"
        ) from None
    entries = data.get("configs") if isinstance(data, dict) else None
    return {
        str(entry.get("config_name", "default")): entry
        for entry in entries or ()
        if isinstance(entry, dict)
    }


def _chosen(name: str, configs: dict[str, Json], subset: str | None) -> str:
    known = first_few(list(configs), 10)
    if subset is not None:
        if subset in configs:
            return subset
        near = difflib.get_close_matches(subset, configs, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {known}"
        raise UserError(f"{name} has no subset {subset!r}; {hint}")
    for key, entry in configs.items():
        if entry.get("default") is True:
            return key
    if "default" in configs:
        return "default"
    if len(configs) == 1:
        return next(iter(configs))
    raise UserError(f"{name} has several subsets and no default; choose with --subset: {known}")


def _patterns(data_files: Any) -> list[str]:
    """Return the globs in ``data_files``, a string, list or mapping in a card's front matter.

    If a split ``train`` exists, only its globs are returned; otherwise those of all splits.
    """
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": paths} for split, paths in data_files.items()]
    entries = [
        entry if isinstance(entry, dict) else {"split": None, "path": entry}
        for entry in data_files or ()
    ]
    training = [entry for entry in entries if entry.get("split") == "train"] or entries
    found = []
    for entry in training:
        paths = entry.get("path") or ()
        if isinstance(paths, str):
            paths = [paths]
        found += [str(path).strip("/") for path in paths]
    return found


def _training(repository: Repository, files: Files) -> Files:
    """Return the files whose path contains the word train, or all files if none does.

    Examples: train/chunk1/…, data/train-00000-of-00010.parquet.
    """
    training = {
        path: file
        for path, file in files.items()
        if re.search(r"(?:^|[^a-z])train(?:[^a-z]|$)", path, re.IGNORECASE)
    }
    if training:
        report_left_out(
            str(repository),
            [path for path in files if path not in training],
            ", because other paths contain the word train",
        )
    return training or files
