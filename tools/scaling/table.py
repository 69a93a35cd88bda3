"""Table of a study, runs.csv, with one row per validation of a run: columns and types, strict
reading, atomic writing. The module does not import torch.

``collect`` writes it; ``fit``, ``plot`` and ``recommend`` read it. A table of published data needs
only the five columns REQUIRED.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from fem_common.errors import ConfigError, convert_os_errors, from_os_error
from fem_common.files import make_folder, write_atomically
from fem_common.text import nearest

# Column -> kind, in the order of the file. int: an integer, or <NA> if a foreign table lacks it.
COLUMNS = {
    "run": "text",  # name of the run
    "variant": "text",  # name of the variant in the study
    "seed": "int",
    "budget": "float",  # planned training FLOPs of the run; NaN in a study without budgets
    "width": "int",
    "layers": "int",
    "heads": "int",
    "parametrization": "text",  # standard | mup
    "parameters": "int",  # all parameters; tied weights count once
    "non_embedding_parameters": "int",
    "flops_per_token": "float",  # training FLOPs, forward and backward
    "batch_tokens": "int",
    "learning_rate": "float",  # peak learning rate
    "step": "int",
    "steps": "int",  # planned steps of the run
    "tokens": "int",  # tokens consumed up to ``step``
    "flops": "float",  # tokens * flops_per_token
    "loss": "float",  # held-out loss, nats per token
    "train_loss": "float",  # mean over the steps since the previous row
    "wall_seconds": "float",  # duration of all steps up to ``step``
    "final": "bool",  # true in the last row of a complete run
    "data": "text",  # identity of the tokenized data
    "tokenizer": "text",
    "config_hash": "text",
    "source": "text",  # run_dir | wandb; empty in a foreign table
}
REQUIRED = ("variant", "parameters", "tokens", "flops", "loss")
_POSITIVE = ("parameters", "tokens", "flops", "loss")
_MISSING = {"text": "", "int": pd.NA, "float": math.nan, "bool": False}
_PANDAS = {"text": "str", "int": "Int64", "float": "float64", "bool": "bool"}
# Published counts may be fractions and are rounded from this number on. A smaller fraction is an
# error: it is a count in millions or billions.
_ROUNDED_FROM = 1000
_PARQUET = (".parquet", ".pq")
_MAKE = "create it with: python -m tools.scaling collect STUDY.yaml"


def as_table(rows: Sequence[dict[str, object]] | dict[str, list[object]]) -> pd.DataFrame:
    """Convert rows, or columns, with all COLUMNS to a table of fixed types and order; None is
    missing.
    """
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({column: _PANDAS[kind] for column, kind in COLUMNS.items()})


def read_table(path: Path) -> pd.DataFrame:
    """Read the table at ``path`` with all COLUMNS and their types: CSV, or Parquet by its suffix.

    A foreign table needs only the REQUIRED columns; each row is then a complete run, and other
    values are missing (``<NA>``, NaN or empty). Integers may be written as 4.4e7. Columns that are
    not in COLUMNS are refused. Raises ConfigError (a column is missing or unknown, a cell is
    missing or of the wrong kind, a loss is not a positive number, a run has a step twice or two
    last rows, two runs have one configuration hash, or data or tokenizers are mixed), StorageError.
    """
    path = Path(path)
    raw = _raw(path)
    _check_columns(path, list(raw.columns))
    foreign = "run" not in raw.columns
    read: dict[str, list[object]] = {
        column: [_MISSING[kind]] * len(raw) for column, kind in COLUMNS.items()
    }
    for column, cells in raw.items():
        read[column] = [_cell(path, *at, column, COLUMNS[column]) for at in enumerate(cells, 2)]
    if foreign:
        read["run"] = [f"{variant}/{row}" for row, variant in enumerate(read["variant"], 1)]
    frame = as_table(read)
    if "final" not in raw.columns:
        frame["final"] = True if foreign else ~frame.duplicated("run", keep="last")
    if "flops_per_token" not in raw.columns:
        frame["flops_per_token"] = frame["flops"] / frame["tokens"].astype("float64")
    check_table(frame, path)
    return frame


def check_table(frame: pd.DataFrame, path: Path) -> None:
    """Raise ConfigError for faults that involve several cells; rows are numbered as lines of
    ``path``, the header is line 1.
    """
    if not len(frame):
        raise ConfigError(f"{path}: the table has no rows; {_MAKE}")
    again = frame[frame["step"].notna() & frame.duplicated(["run", "step"])]
    for index, row in again.iterrows():
        raise ConfigError(
            f"{path}: line {index + 2}: run {row['run']} has step {row['step']} twice; keep one of"
            " the two rows"
        )
    last = frame[frame["final"]]
    for index, row in last[last.duplicated("run")].iterrows():
        raise ConfigError(
            f"{path}: line {index + 2}: run {row['run']} has two rows with final = true; keep one"
            " of them"
        )
    _check_hashes(frame, path)
    runs = frame.drop_duplicates("run")
    for column, what in (("data", "data"), ("tokenizer", "a tokenizer")):
        first = runs.iloc[0]
        for _, row in runs[runs[column] != first[column]].iterrows():
            raise ConfigError(
                f"{path}: {column}: runs {first['run']} and {row['run']} have {what} of different"
                f" identity ({first[column] or 'none'} and {row[column] or 'none'}): their losses"
                " cannot be compared; keep the runs of one"
            )


def _check_hashes(frame: pd.DataFrame, path: Path) -> None:
    """Raise ConfigError for two runs with one configuration, which would count one result twice."""
    names: dict[str, str] = {}
    for name, identity in zip(frame["run"], frame["config_hash"], strict=True):
        other = names.setdefault(identity, name)
        if identity and other != name:
            raise ConfigError(
                f"{path}: config_hash: runs {other} and {name} have the same configuration"
                f" ({identity}), so one result would count twice; keep one, or give them different"
                " seeds"
            )


def final_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of every complete run, in the table's order, numbered from 0."""
    return frame[frame["final"]].reset_index(drop=True)


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write the table atomically: CSV whose numbers read back exactly, or Parquet by the suffix.

    Raises ConfigError (the path is invalid), StorageError.
    """
    path, content = Path(path), io.BytesIO()
    if path.suffix in _PARQUET:
        frame.to_parquet(content, index=False)
    else:
        frame.to_csv(content, index=False, lineterminator="\n")
    write_file(path, content.getvalue())


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically and create its folder. Raises ConfigError (the path is invalid),
    StorageError.
    """
    make_folder(path.parent)
    with convert_os_errors():
        write_atomically(path, content)


def _raw(path: Path) -> pd.DataFrame:
    """Read CSV as text, so that messages can name every cell; read Parquet unchanged."""
    try:
        if path.suffix in _PARQUET:
            with path.open("rb") as file:
                return pd.read_parquet(file)
        with path.open(encoding="utf-8", newline="") as text:
            return pd.read_csv(text, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such table; {_MAKE}") from None
    except OSError as error:
        raise from_os_error(error) from None
    except pd.errors.EmptyDataError:
        raise ConfigError(f"{path}: the table is empty; {_MAKE}") from None
    except ValueError as error:  # pandas and pyarrow raise it for files that are not tables
        raise ConfigError(f"{path}: not a readable table: {error}") from None


def _check_columns(path: Path, found: list[str]) -> None:
    for column in found:
        if column not in COLUMNS:
            near = nearest(column, list(COLUMNS))
            help_text = f"did you mean {near}?" if near else f"columns: {', '.join(COLUMNS)}"
            raise ConfigError(f"{path}: unknown column {column!r}; {help_text}")
    collected = "run" in found and "config_hash" in found
    absent = [column for column in (COLUMNS if collected else REQUIRED) if column not in found]
    if absent:
        raise ConfigError(
            f"{path}: column {', '.join(absent)} is missing; a table needs at least"
            f" {', '.join(REQUIRED)}"
        )


def _cell(path: Path, line: int, cell: object, name: str, kind: str) -> object:
    """Convert a cell to its column's kind; errors name line and column. Raises ConfigError."""
    where = f"{path}: line {line}: {name}"
    missing = pd.isna(cell) or cell == ""
    if kind == "text":
        if missing and name in ("run", "variant"):
            raise ConfigError(f"{where} is empty; every row needs a value")
        return "" if missing else str(cell)
    if kind == "bool":
        if str(cell).lower() not in ("true", "false"):
            raise ConfigError(f"{where} = {cell!r}: expected true or false")
        return str(cell).lower() == "true"
    if missing:
        if name in REQUIRED:
            raise ConfigError(f"{where} is missing; leave the run out, or run it again")
        return _MISSING[kind]
    value = _number(cell)
    if value is None:
        raise ConfigError(f"{where} = {cell!r}: expected a number")
    if name in REQUIRED and not math.isfinite(value):
        raise ConfigError(
            f"{where} = {cell!r} is not finite: the run diverged or was cut off; leave it out, or"
            " run it again"
        )
    if name in _POSITIVE and value <= 0:
        raise ConfigError(f"{where} = {cell!r}: expected more than 0")
    if kind == "float":
        return float(value)
    in_range = math.isfinite(value) and abs(value) < 2**63
    if not in_range or (value != round(value) and abs(value) < _ROUNDED_FROM):
        raise ConfigError(f"{where} = {cell!r}: expected a whole number")
    return round(value)


def _number(cell: object) -> int | float | None:
    """Convert a cell to a number, integers exactly; None if it is not a number."""
    for kind in (int, float):
        with suppress(ValueError):  # also raised for True and False, which are not numbers
            return kind(str(cell))
    return None
