"""Search for the input files that a command line names, and detection of each file's kind.

This module does not depend on rows or columns.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_prep.sources import hub
from data_prep.sources.names import is_data, kind_by_name, report_left_out
from data_prep.sources.streams import GZIP, ZSTD, is_skippable
from fem_common.errors import UserError, from_os_error
from fem_common.files import expand_home

TEXT, SPLITS = ".txt", "dataset_dict.json"
KNOWN = ".parquet, .arrow, .jsonl, .jsonl.gz, .jsonl.zst or .txt"
CONTINUATION = b"\xff\xff\xff\xff"  # begins each message of an Arrow stream
BOM = b"\xef\xbb\xbf"
NO_TEXT = {
    b"version http": "is a Git LFS pointer; fetch the file itself with git lfs pull",
    b"ARROW1": "is an Arrow file of the Feather format; write it as parquet",
    b"PARE": "is an encrypted parquet file; decrypt it first",
    b"\xff\xfe": "looks like UTF-16; write it as UTF-8",
    b"\xfe\xff": "looks like UTF-16; write it as UTF-8",
    b"BZh": "is packed with bzip2; unpack it or use gzip or zstd",
    b"\xfd7zXZ": "is packed with xz; unpack it or use gzip or zstd",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"%PDF": "is a PDF; write its text as UTF-8",
}


@dataclass(frozen=True)
class Found:
    """Input file that was found for an argument of the command line.

    path: path or Hub URL of the file.
    given: argument that selected the file.
    name: path relative to the folder, glob or repository that was given, or the file name.
    remote: metadata on the Hub; None for a local file.
    """

    path: str
    given: str
    name: str
    remote: hub.RemoteFile | None = None

    @property
    def folder(self) -> str:
        """Folder, glob base or repository to which ``name`` is relative."""
        return self.path.removesuffix(self.name).rstrip("/") or self.path[: -len(self.name)] or "."

    @property
    def is_text(self) -> bool:
        """True if the file is plain text: a local .txt file."""
        return self.remote is None and self.name.lower().endswith(TEXT)


def find_files(inputs: Iterable[str], subset: str | None = None) -> list[Found]:
    """Return the files of the inputs in the given order, sorted within each input.

    An input is a file, a folder (all data files below it), a glob, or an ``hf://`` address. Hidden
    names are skipped. Raises UserError for an input without files, a name that is not UTF-8, or a
    file that is given twice.
    """
    inputs = list(map(expand_home, inputs))
    if subset is not None and not any(map(hub.is_hub, inputs)):
        raise UserError(f"--subset {subset} goes with an hf:// input")
    found: list[Found] = []
    for name in inputs:
        _check_name(name)
        if hub.is_hub(name):
            found += [
                Found(file.url, name, file.url.partition("@")[2].partition("/")[2], file)
                for file in hub.resolve(name, subset)
            ]
        else:
            found += [
                Found(str(path), name, path.relative_to(folder).as_posix())
                for path, folder in _local(name)
            ]
    seen: set[str] = set()
    for file in found:
        _check_name(file.path)
        identity = file.path if file.remote else str(Path(file.path).resolve())
        if identity in seen:
            raise UserError(f"{file.path} is given twice; each input file counts once")
        seen.add(identity)
    return found


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{path.encode('utf-8', 'backslashreplace').decode()}: its name is not UTF-8: rename it"
        ) from None


def _local(name: str) -> list[tuple[Path, Path]]:
    """Return (file, base folder) for each file of a local input.

    The name under which a file is reported is relative to its base folder.
    """
    path = Path(name)
    if path.is_dir():
        if not (files := _below(path)):
            raise UserError(f"no {KNOWN} file in the folder {name}")
        return [(file, path) for file in files]
    if path.exists():
        return [(path, path.parent)]
    if not glob.has_magic(name):
        raise UserError(f"no such file: {name}")
    matches = sorted(Path(match) for match in glob.glob(name, recursive=True))
    found = {match: _below(match) if match.is_dir() else [match] for match in matches}
    files = [file for below in found.values() for file in below]
    if not files:
        raise UserError(f"no file matches {name}")
    report_left_out(name, [f"{folder}/" for folder, below in found.items() if not below])
    plain = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    # dir/** matches a folder and its content, so files may occur twice.
    return [(file, plain) for file in dict.fromkeys(files)]


def _below(folder: Path) -> list[Path]:
    """Return the data files below a folder; if there are any, list the other files on stderr.

    Links to folders are followed, unless they lead to one of their parent folders. .txt files are
    data only if the folder has no other data; otherwise they are notes and licences. Raises
    UserError for a broken link, and ConfigError or StorageError for a folder that cannot be read.
    """
    names, hidden = _walk(folder)
    for name in sorted(names):
        path = folder / name
        if path.is_symlink() and not path.exists():  # its target may be a folder of data
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which does not exist; restore that, "
                "or remove the link"
            )
    files = [name for name in names if (folder / name).is_file()]
    if SPLITS in names:
        splits = sorted({name.partition("/")[0] for name in files if "/" in name})
        raise UserError(
            f"{folder} is a DatasetDict of the splits {', '.join(splits)}; name one, for example"
            f" {folder / splits[0] if splits else folder / 'train'}"
        )
    data = [name for name in files if is_data(name)]
    if not data:
        data = [name for name in files if name.lower().endswith(TEXT)]
    if data:
        report_left_out(str(folder), [*set(names).difference(data), *hidden])
    return sorted(folder / name for name in data)


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """Return (files, hidden names) of a folder and its subfolders, as paths relative to the folder.

    The files include broken links. The hidden names are files and folders; hidden folders are not
    entered.
    """
    names, hidden = list[str](), list[str]()

    def failed(error: OSError) -> None:
        raise from_os_error(error)

    for place, folders, files in os.walk(folder, onerror=failed, followlinks=True):
        here = Path(place)
        relative = here.relative_to(folder)
        hidden += [(relative / name).as_posix() + "/" for name in folders if name.startswith(".")]
        hidden += [(relative / name).as_posix() for name in files if name.startswith(".")]
        above = [here, *list(here.parents)[: len(relative.parts)]]
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not any(map((here / name).samefile, above))
        ]
        names += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    return names, hidden


def kind_of(path: str, file: BinaryIO) -> str:
    """Return the kind of an input file from its first bytes.

    It is parquet, arrow (a stream), jsonl, jsonl.gz or jsonl.zst. Raises UserError if the file is
    empty, has an unsupported kind, or has another kind than its name indicates.
    """
    begin = file.read(512)
    if not begin:
        raise UserError(f"{path} is empty")
    named, kind = kind_by_name(path.rsplit("/", 1)[-1]), _kind_by_content(begin)
    if kind is None:
        raise UserError(
            f"{path} is not a {named or 'parquet or JSONL'} file: it {_probable_format(begin)}"
        )
    if named is not None and named != kind:
        raise UserError(f"{path} is not a {named} file: its content is {kind}; rename it")
    return kind


def check_text(path: str, begin: bytes) -> None:
    """Raise UserError if ``begin``, the beginning of a .txt file, is not text."""
    found = next((what for start, what in NO_TEXT.items() if begin.startswith(start)), None)
    if found or begin[:4] == b"PAR1" or _kind_by_content(begin) not in ("jsonl", None):
        raise UserError(
            f"{path} is named .txt and "
            f"{found or f'its content is {_kind_by_content(begin)}; rename it'}"
        )


def _kind_by_content(begin: bytes) -> str | None:
    if begin[:4] == b"PAR1":
        return "parquet"
    if begin[:4] == CONTINUATION:
        return "arrow"
    if begin[:2] == GZIP:
        return "jsonl.gz"
    if begin[:4] == ZSTD or is_skippable(begin):
        return "jsonl.zst"
    text = begin.removeprefix(BOM).lstrip(b" \t\r\n")
    return "jsonl" if text[:1] == b"{" or not text else None


def _probable_format(begin: bytes) -> str:
    """Return a message part with the probable format of an unsupported file and what to do."""
    known = NO_TEXT | {
        b"<": "looks like an HTML or XML page; download the file again",
        b"[": "looks like a JSON array; write one object per line",
    }
    text = begin.removeprefix(BOM).lstrip(b" \t\r\n")
    found = next((what for start, what in known.items() if text.startswith(start)), None)
    return found or f"begins with {begin[:16]!r}; inputs are {KNOWN}"
