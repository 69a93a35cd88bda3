"""Verb ``stdlib``: write the running Python's standard library as parquet.

The file has FineWeb-Edu's schema. It is a real corpus of about 12 MB that is available on every
machine. The library's own tests and lib2to3 are excluded (with them it is 31 MB), as well as files
that are not its sources: installed packages, links to other folders, and build settings (config-*,
_sysconfigdata*), which contain paths of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fem_common.errors import UserError, from_os_error
from fem_common.files import make_folder, sha256, sync_file, sync_folder

TEXTS = ("text", "id", "dump", "url", "file_path", "language")
NUMBERS = {
    "language_score": pa.float64(),
    "token_count": pa.int64(),
    "score": pa.float64(),
    "int_score": pa.int64(),
}
SCHEMA = pa.schema(dict.fromkeys(TEXTS, pa.string()) | NUMBERS)
SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
}
ROWS_PER_GROUP = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("out", metavar="OUT.parquet", type=Path, help="file to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUT.parquet if it has other content"
    )


def source_files(root: Path) -> Iterator[str]:
    """Yield the paths of the library's source files relative to ``root``, with forward slashes.

    The paths are sorted within each folder.
    """
    real_root = root.resolve()
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name for name in names if name not in SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for name in sorted(files):
            path = Path(folder, name)
            if (
                path.suffix == ".py"
                and not name.startswith("_sysconfigdata")
                and path.resolve().is_relative_to(real_root)
            ):
                yield path.relative_to(root).as_posix()


def collect(root: Path) -> tuple[pa.Table, Counter[str]]:
    """Return the library as a table, and the number of files left out by reason.

    The reasons are: empty, duplicate, not UTF-8.
    """
    version = platform.python_version()
    rows: list[dict[str, str]] = []
    seen: set[bytes] = set()
    dropped: Counter[str] = Counter()
    for name in source_files(root):
        raw = (root / name).read_bytes()
        digest = hashlib.blake2b(raw).digest()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            dropped["not UTF-8"] += 1
            continue
        if not text.strip() or digest in seen:
            dropped["duplicate" if text.strip() else "empty"] += 1
            continue
        seen.add(digest)
        url = f"https://github.com/python/cpython/blob/v{version}/Lib/{name}"
        rows.append(
            {
                "text": text,
                "id": f"stdlib/{name}",
                "dump": f"cpython-{version}",
                "url": url,
                "file_path": name,
                "language": "en",
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA), dropped


def main(arguments: argparse.Namespace) -> int:
    """Write the library to the output file, which is not changed if it has the same content.

    Return 0. Raises UserError.
    """
    root, out = Path(sysconfig.get_path("stdlib")), arguments.out
    if out.is_dir():
        raise UserError(
            f"{out} is a folder; name the file to write, such as {out / 'stdlib.parquet'}"
        )
    table, dropped = collect(root)
    if not table.num_rows:
        raise UserError(
            f"this Python has no standard library sources in {root}; run data_prep with "
            "another Python"
        )
    make_folder(out.parent)
    temporary = out.with_name(f".{out.name}.unfinished")
    try:
        pq.write_table(
            table,
            temporary,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            write_page_checksum=True,
        )
        sync_file(temporary)
        same = out.exists() and sha256(temporary) == sha256(out)
        if out.exists() and not same and not arguments.overwrite:
            raise UserError(
                f"{out} exists with other content; choose another name or add --overwrite"
            )
        os.replace(temporary, out)
        sync_folder(out.parent)
    except OSError as error:
        raise from_os_error(error, f"cannot write {out} (", ")") from None
    finally:
        temporary.unlink(missing_ok=True)
    text_bytes = sum(len(text.encode()) for text in table.column("text").to_pylist())
    left_out = (
        ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items())) or "none"
    )
    state = "unchanged" if same else "written"
    size = f"{table.num_rows} documents, {text_bytes / 1e6:.1f} MB of text"
    print(f"{out}: {state}; {size} (Python {platform.python_version()}); left out: {left_out}")
    return 0
