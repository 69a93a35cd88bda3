"""data_prep: datasets on the Hugging Face Hub: the files that an hf:// address and a subset mean, at one commit, and their bytes.

An address is ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, where PATH is a file, a folder or a glob. Without PATH the files are those of
a subset, as the front matter of the dataset's card names them (``configs``: ``config_name``, ``data_files``).
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import yaml

from data_prep.sources.hub_client import LONG_WAITS, SHORT_WAITS, Repository, patiently
from data_prep.sources.names import is_data, report_left_out
from fem_common.errors import UserError
from fem_common.text import one_line

SCHEME = "hf://"

_ADDRESS = re.compile(
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class RemoteFile:
    """``url``: ``hf://datasets/OWNER/NAME@COMMIT/PATH``; ``etag``: its content's hash, ``sha256:…`` of a large file, else ``git:…``."""

    url: str
    bytes: int
    etag: str


def is_hub(address: str) -> bool:
    """Whether an input is an address on the Hub rather than a local path."""
    return address.startswith(SCHEME)


def resolve(url: str, subset: str | None = None) -> list[RemoteFile]:
    """The files of an address, in order of their paths, with the commit that its revision is at now. Raises UserError."""
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
    """A file of ``resolve`` for reading at any place; ``ahead``: much of it will be read: large blocks, the next in the background."""
    repository, path = _parse(url)
    if not path:
        raise UserError(f"{url} names no file")
    return cast(BinaryIO, HubFile(repository, path, ahead=ahead))


class HubFile(io.RawIOBase):
    """One file at one commit, read only, by huggingface_hub's own file system. A broken read opens it anew and goes on where it was.

    Raises CommandError, never OSError, where the bytes do not come: a reader must not take a broken network for a damaged file.
    """

    def __init__(self, repository: Repository, path: str, *, ahead: bool = False) -> None:
        super().__init__()
        self.name = f"{repository}/{path}"
        self._repository, self._path, self._ahead = repository, path, ahead
        self._place, self._file = 0, None
        self._size: int = self._patiently(lambda file: file.size)

    def _patiently(self, ask: Callable[[Any], Any]) -> Any:
        def attempt() -> Any:
            self._file = self._file or self._open()
            try:
                return ask(self._file)
            except BaseException:
                self._file = None  # its cache may hold the failure
                raise

        return patiently(attempt, self._repository, LONG_WAITS)

    def _open(self) -> Any:
        from huggingface_hub import HfFileSystem

        kind, block, blocks = (
            ("background", 8 << 20, 4) if self._ahead else ("blockcache", 1 << 18, 8)
        )
        where = f"{self._repository.kind}s/{self._repository.id}@{self._repository.revision}/{self._path}"
        file = HfFileSystem().open(
            where, block_size=block, cache_type=kind, cache_options={"maxblocks": blocks}
        )
        address, fetch = file.url(), file.cache.fetcher
        file.url = lambda: address  # which asks the Hub what the file is, each time

        def whole(start: int, end: int) -> bytes:
            data: bytes = fetch(start, end := min(end, file.size))
            if len(data) != end - start:
                came = f"{len(data)} bytes of {self._path} came where {end - start} were asked for"
                raise UserError(f"{self._repository}: {came}; first {self._repository.download}")
            return data

        file.cache.fetcher = whole
        return file

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; the place."""
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[
            whence
        ] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the file reaches; the number of bytes."""
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
            f"{repository.id} is no name of a dataset ({one_line(error).rstrip('.')})"
        ) from None
    except (ValueError, KeyError, TypeError):  # the answer is a page, or another JSON
        commit = ""
    if re.fullmatch(r"[0-9a-f]{40,64}", commit) is None:
        raise UserError(
            f"{repository}: {constants.ENDPOINT} does not answer as a Hugging Face Hub does; is HF_ENDPOINT right?"
        )
    return commit


# --- files --------------------------------------------------------------------------------------------------------------------------

Files = dict[str, tuple[int, str]]  # path -> bytes, etag


def _file(entry: Any) -> tuple[int, str]:
    return (
        (entry.lfs.size, f"sha256:{entry.lfs.sha256}")
        if entry.lfs is not None
        else (entry.size, f"git:{entry.blob_id}")
    )


def _entry(repository: Repository, path: str) -> Files | None:
    """The file of that name; nothing in it where the name is a folder's; None where there is neither."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def ask() -> Files | None:
        entries = HfApi().get_paths_info(
            repository.id, [path], revision=repository.revision, repo_type="dataset"
        )
        return (
            {entry.path: _file(entry) for entry in entries if isinstance(entry, RepoFile)}
            if entries
            else None
        )

    return patiently(ask, repository, SHORT_WAITS)


def _listed(repository: Repository, folder: str) -> Files:
    """Every file below a folder ("" for all); none where there is no such folder."""
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
    """Those that a folder is read for; the others, such as cards, licences and pictures, are named on stderr."""
    found = {path: file for path, file in files.items() if is_data(path)}
    if found:
        report_left_out(str(repository), [path for path in files if path not in found])
    return found


def _at_path(repository: Repository, path: str) -> Files:
    """A file, all data files of a folder, or what matches a glob. Raises UserError where there are none."""
    name = f"{repository.kind} {repository.id}"
    if _is_glob(path):
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


def _is_glob(path: str) -> bool:
    return re.search(r"[*?[]", path) is not None


def _matching(repository: Repository, patterns: Iterable[str]) -> Files:
    """Files that match a glob, as Python's glob reads it: ``*`` within a name, ``**`` any folders, no hidden names."""
    found: Files = {}
    for pattern in patterns:
        parts = _parts(pattern)
        fixed = next((i for i, part in enumerate(parts) if _is_glob(part)), len(parts) - 1)
        files = _listed(repository, "/".join(parts[:fixed]))
        found |= {path: file for path, file in files.items() if _matches(_parts(path), parts)}
    return found


def _matches(path: list[str], pattern: list[str]) -> bool:
    if not pattern or not path:
        return not pattern and not path
    hidden = path[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        inside = len(path) == 1 and set(pattern) == {
            "**"
        }  # what is left is a file, and anything goes
        return _matches(path, pattern[1:]) or (
            not hidden and (inside or _matches(path[1:], pattern))
        )
    return (
        not hidden and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
    )


# --- subsets ------------------------------------------------------------------------------------------------------------------------


def _of_subset(repository: Repository, subset: str | None) -> Files:
    """The files of a subset of the card, without subset of its default; where the card names none, those of the whole repository."""
    configs = _configs(repository)
    name = f"{repository.kind} {repository.id}"
    if not configs:
        if subset is not None:
            raise UserError(
                f"{name} names no subsets in its card; give a folder instead: hf://datasets/{repository.id}/FOLDER"
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
            found = (
                _readable(repository, matching) or matching
            )  # of other names: the content tells what they are
        else:
            found = _training(repository, _readable(repository, _listed(repository, folder)))
    if not found:
        raise UserError(
            f"{name}{f', subset {subset}' if subset else ''} has no .parquet, .jsonl, .jsonl.gz or .jsonl.zst file"
        )
    return found


def _configs(repository: Repository) -> dict[str, dict[str, Any]]:
    """config_name -> its entry in the card's front matter; empty where there is no card or it names none."""
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
            f"{repository}: the front matter of its README.md is not YAML ({problem}); give a path instead"
        ) from None
    entries = data.get("configs") if isinstance(data, dict) else None
    return {
        str(entry.get("config_name", "default")): entry
        for entry in entries or ()
        if isinstance(entry, dict)
    }


def _chosen(name: str, configs: dict[str, dict[str, Any]], subset: str | None) -> str:
    if subset is not None:
        if subset in configs:
            return subset
        near = difflib.get_close_matches(subset, configs, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {_some(list(configs))}"
        raise UserError(f"{name} has no subset {subset!r}; {hint}")
    default = [key for key, entry in configs.items() if entry.get("default") is True] or [
        key for key in configs if key == "default"
    ]
    if default or len(configs) == 1:
        return (default or list(configs))[0]
    raise UserError(
        f"{name} has several subsets and no default; choose with --subset: {_some(list(configs))}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _patterns(data_files: Any) -> list[str]:
    """The globs of ``data_files`` in any of its forms; of several splits ``train`` where there is one, otherwise all."""
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": paths} for split, paths in data_files.items()]
    entries = [
        entry if isinstance(entry, dict) else {"split": None, "path": entry}
        for entry in data_files or ()
    ]
    training = [entry for entry in entries if entry.get("split") == "train"] or entries
    paths = [entry.get("path") or () for entry in training]
    return [
        str(path).strip("/")
        for some in paths
        for path in ([some] if isinstance(some, str) else some)
    ]


def _training(repository: Repository, files: Files) -> Files:
    """Those whose path has the word train (train/chunk1/…, data/train-00000-of-00010.parquet), where there are any; otherwise all."""
    training = {
        path: file
        for path, file in files.items()
        if re.search(r"(?:^|[^a-z])train(?:[^a-z]|$)", path, re.IGNORECASE)
    }
    if training:
        report_left_out(
            str(repository),
            [path for path in files if path not in training],
            ", as other paths have the word train",
        )
    return training or files
