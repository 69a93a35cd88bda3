"""data_prep: what is read: parquet files, checked before any work starts, then row group by row group."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.errors import UserError, one_line
from data_prep.files import sha256_file

ROWS_PER_READ = 512


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold a document's text and its id."""

    text: str = "text"
    id: str = "id"


@dataclass(frozen=True)
class ParquetFile:
    """One input file: rows and row groups from its footer; ``text_bytes`` is its text column's size in memory, about."""

    path: Path
    rows: int
    row_groups: int
    text_bytes: int


def find_files(inputs: list[str]) -> list[Path]:
    """Files, folders (every .parquet below, sorted) and globs, as files. Raises UserError for a name without files, or a file twice."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = sorted(
                p for p in path.rglob("*.parquet") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
            )
            problem = f"no .parquet file in the folder {name}"
        elif path.exists():
            files, problem = [path], ""
        else:
            files = sorted(Path(match) for match in glob.glob(name, recursive=True))
            problem = f"no such file: {name}" if not glob.has_magic(name) else f"no file matches {name}"
        if not files:
            raise UserError(problem)
        found += files
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice; each input file counts once")
        seen.add(path.resolve())
    return found


def open_files(inputs: list[str], columns: Columns) -> list[ParquetFile]:
    """Find the input files and check type, columns and column types of each. Raises UserError."""
    return [_check(path, columns) for path in find_files(inputs)]


def _check(path: Path, columns: Columns) -> ParquetFile:
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({one_line(error).rstrip('.')})") from None
    for name, option in ((columns.text, "--text-column"), (columns.id, "--id-column")):
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"name it with {option}"
            raise UserError(f"{path} has no column {name!r} (it has: {', '.join(schema.names)}); {hint}")
    text_type, id_type = schema.field(columns.text).type, schema.field(columns.id).type
    if not _is_text(text_type):
        raise UserError(f"{path}: column {columns.text!r} is {text_type}, not text; name the text column with --text-column")
    if not (_is_text(id_type) or pa.types.is_integer(id_type)):
        raise UserError(f"{path}: column {columns.id!r} is {id_type}, neither text nor integer; name the id column with --id-column")
    text_bytes = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        chunks = (row_group.column(i) for i in range(row_group.num_columns))
        text_bytes += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == columns.text)
    return ParquetFile(path, metadata.num_rows, metadata.num_row_groups, text_bytes)


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(test(value) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary))


def read_rows(file: ParquetFile, columns: Columns) -> Iterator[tuple[list[bytes | None], list[bytes | None]]]:
    """Yield (texts, ids) of consecutive rows as undecoded bytes, in order. Raises UserError naming a row group that cannot be read."""
    wanted = list(dict.fromkeys((columns.text, columns.id)))
    try:
        reader = pq.ParquetFile(file.path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.path} cannot be read ({one_line(error)})") from None
    with reader:
        for group in range(file.row_groups):
            try:
                for batch in reader.iter_batches(batch_size=ROWS_PER_READ, row_groups=[group], columns=wanted):
                    yield _as_bytes(batch.column(columns.text)), _as_bytes(batch.column(columns.id))
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"{file.path}: row group {group} of {file.row_groups} cannot be read ({one_line(error)}); fetch or write the file again"
                ) from None


def _as_bytes(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.large_binary()).to_pylist()


def describe_inputs(files: list[ParquetFile]) -> list[dict[str, str | int]]:
    """Path, rows, bytes and content hash of each input, for manifests and fingerprints."""
    return [{"path": str(f.path), "rows": f.rows, "bytes": f.path.stat().st_size, "sha256": sha256_file(f.path)} for f in files]
