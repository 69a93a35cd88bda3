"""User-defined row filters: a Python file with a function that selects the rows to keep.

    # dedup.py, used as --mask dedup.py:keep
    from pathlib import Path
    import numpy as np

    # Optional: columns to read in addition to the text and the id.
    columns = ("url",)
    # Optional: files in the same folder that this file reads. Changing them changes the data.
    files = ("duplicates.txt",)
    duplicates = set(Path(__file__).with_name("duplicates.txt").read_text().split())

    def keep(batch, places, path):
        return np.array([id not in duplicates for id in batch.column("id").to_pylist()])

``batch`` is a pyarrow.RecordBatch [n] of the rows that all other filters accept. The text column
has the type large_string. The id column has the type large_string too, with bytes that are not
UTF-8 replaced by U+FFFD. The additional columns have their stored types. ``places`` int64 [n] are
row numbers of a parquet file or byte offsets of JSONL lines in the file ``path``. The function
returns a boolean Arrow or NumPy array [n] without nulls. The division of rows into batches is not
fixed, so the result for a row must depend on that row alone.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.aliases import BoolArray, Int64Array
from fem_common.errors import UserError, from_os_error
from fem_common.text import one_line


@dataclass(frozen=True)
class Mask:
    """User-defined row filter, loaded from a Python file.

    columns: columns that the filter reads in addition to the text and the id.
    sha256: hash of the Python file and of its ``files``.
    """

    file: Path
    name: str
    function: Callable[..., Any]
    columns: tuple[str, ...]
    sha256: str

    def keep(self, batch: pa.RecordBatch, places: Int64Array, path: str) -> BoolArray:
        """Return a bool array [n] that is True for the rows of ``batch`` to keep.

        Raises UserError if the function fails or returns a wrong value. The message contains the
        failing line and the rows concerned.
        """
        try:
            answer = self.function(batch, places, path)
        except Exception as error:  # user code may raise anything
            raise UserError(
                f"{_where(error, self.file)}: {_what(error)} (in {self.name}, "
                f"{_rows(places, path)})"
            ) from None
        return self._checked(answer, len(places), _rows(places, path))

    def _checked(self, answer: object, rows: int, where: str) -> BoolArray:
        owner = f"{self.file}: {self.name}"
        if isinstance(answer, pa.ChunkedArray):
            answer = answer.combine_chunks()
        if isinstance(answer, pa.Array):
            kind = str(answer.type)
            if pa.types.is_boolean(answer.type):
                if answer.null_count:
                    raise UserError(
                        f"{owner} returned {answer.null_count} nulls; each row needs true "
                        f"(keep) or false ({where})"
                    )
                answer = answer.to_numpy(zero_copy_only=False)
        else:
            kind = str(answer.dtype) if isinstance(answer, np.ndarray) else type(answer).__name__
        if not isinstance(answer, np.ndarray) or answer.dtype != np.bool_ or answer.ndim != 1:
            shape = (
                f" of shape {answer.shape}"
                if isinstance(answer, np.ndarray) and answer.ndim != 1
                else ""
            )
            raise UserError(
                f"{owner} returned {kind}{shape}, not a boolean Arrow or NumPy array of one "
                f"dimension ({where})"
            )
        if len(answer) != rows:
            raise UserError(f"{owner} returned {len(answer)} values for {rows} rows ({where})")
        return answer


def load_mask(spec: str) -> Mask:
    """Load the function that ``FILE.py:FUNCTION`` names and return it as a Mask.

    Raises UserError if the file or the function does not exist or if executing the file fails.
    """
    name, colon, function_name = spec.rpartition(":")
    if not colon or not name.endswith(".py") or not function_name.isidentifier():
        raise UserError(f"--mask is {spec!r}; it must be FILE.py:FUNCTION, such as dedup.py:keep")
    file = Path(name)
    try:
        source = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no such file: {file} (of --mask {spec})") from None
    except OSError as error:
        raise from_os_error(error, f"--mask {spec} cannot be read (", ")") from None
    module = ModuleType("data_prep_mask")
    module.__file__ = str(file.absolute())
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
    except Exception as error:  # user code may raise anything
        raise UserError(f"{_where(error, file)}: {_what(error)} (--mask {spec})") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise UserError(
            f"{file} has no function {function_name!r} (it has: {', '.join(defined) or 'none'}), "
            f"required by --mask {spec}"
        )
    return Mask(
        file,
        function_name,
        function,
        _names(module, "columns", file),
        _digest(source, _names(module, "files", file), file),
    )


def _names(module: ModuleType, key: str, file: Path) -> tuple[str, ...]:
    value = getattr(module, key, ())
    if not isinstance(value, tuple | list) or not all(
        isinstance(name, str) and name for name in value
    ):
        raise UserError(
            f"{file}: {key} is {value!r}; it must be a tuple of names, such as ({key[:-1]!r},)"
        )
    return tuple(value)


def _digest(source: bytes, files: tuple[str, ...], file: Path) -> str:
    digest = hashlib.sha256(source)
    for name in files:
        try:
            with (file.parent / name).open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise from_os_error(error, f"{file}: its file {name!r} cannot be read (", ")") from None
    return digest.hexdigest()


def _where(error: Exception, file: Path) -> str:
    """Return FILE.py:LINE of the place in the mask file that caused the error.

    This is the innermost line of the file in the traceback, or the line of a syntax error. The file
    alone is returned if the traceback contains no line of it.
    """
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _what(error: Exception) -> str:
    text = one_line(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def _rows(places: Int64Array, path: str) -> str:
    return (
        f"{len(places)} rows at {places[0]} to {places[-1]} of {path or 'the input'}"
        if len(places)
        else f"no rows of {path or 'the input'}"
    )
