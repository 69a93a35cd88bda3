"""runs.csv: what is written is read back exactly, a foreign table is enough, and no bad cell passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fem_common.errors import ConfigError
from tests.tools.scaling.made_up import isoflop_table
from tests.wording import Wording
from tools.scaling.table import COLUMNS, final_runs, read_table, write_table


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_written_and_read_back_exactly(tmp_path: Path, suffix: str) -> None:
    table = isoflop_table(2, 2)
    path = tmp_path / "deep" / f"runs{suffix}"
    write_table(table, path)
    pd.testing.assert_frame_equal(read_table(path), table, check_exact=True)
    assert list(table.columns) == list(COLUMNS)
    assert len(final_runs(table)) == 2 * 2 * 5
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing unfinished stays"


def test_published_numbers_need_five_columns(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text("variant,parameters,tokens,flops,loss\nchinchilla,4.4e7,1.25e9,3.3e17,3.2\nchinchilla,74000000.5,2e9,8.9e17,3.0\n")
    table = read_table(path)
    assert table["parameters"].tolist() == [44_000_000, 74_000_000]
    assert table["final"].tolist() == [True, True]
    assert table["run"].is_unique
    assert table["budget"].isna().all() and table["width"].isna().all(), "what is not told is missing, not zero"
    assert table["flops_per_token"].tolist() == [3.3e17 / 1.25e9, 8.9e17 / 2e9]


def cell(table: pd.DataFrame, column: str, value: object, row: int = 4) -> pd.DataFrame:
    changed = table.astype({column: "object"})
    changed.loc[row, column] = value
    return changed


def of_first_run(table: pd.DataFrame, column: str, value: str) -> pd.DataFrame:
    return table.assign(**{column: table[column].where(table["run"] != table["run"].iloc[0], value)})


BAD: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "a loss that is missing": lambda table: cell(table, "loss", None),
    "a loss that is NaN": lambda table: cell(table, "loss", "nan"),
    "a loss that is text": lambda table: cell(table, "loss", "3,2"),
    "no tokens": lambda table: cell(table, "tokens", 0),
    "parameters in millions": lambda table: cell(table, "parameters", 44.5),
    "two runs of one configuration": lambda table: of_first_run(table, "config_hash", table["config_hash"].iloc[5]),
    "two tokenizers": lambda table: of_first_run(table, "tokenizer", "other"),
    "two data sets": lambda table: of_first_run(table, "data", "other"),
    "a step twice": lambda table: pd.concat([table, table.iloc[:1]]),
    "two ends": lambda table: cell(table, "final", True, 3),
    "no loss column": lambda table: table.drop(columns="loss"),
    "a misspelt column": lambda table: table.rename(columns={"tokens": "token"}),
    "no rows": lambda table: table.iloc[:0],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_by_line_and_column(tmp_path: Path, name: str, wording: Wording) -> None:
    path = tmp_path / "runs.csv"
    BAD[name](isoflop_table(1, 2)).to_csv(path, index=False)
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path))
    wording(caught.value)


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(ConfigError, match=r"no such table; make it with: python -m tools\.scaling collect"):
        read_table(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        read_table(path)
    path.with_suffix(".parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="not a readable table"):
        read_table(path.with_suffix(".parquet"))
