"""Tests of runs.csv: written values are read back exactly, a foreign table is sufficient, and every
invalid cell is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fem_common.errors import ConfigError
from tests.tools.scaling.studies import table
from tests.wording import Wording
from tools.scaling.table import COLUMNS, final_runs, read_table, write_table


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_written_and_read_back_exactly(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"runs{suffix}"
    write_table(table(), path)
    pd.testing.assert_frame_equal(read_table(path), table(), check_exact=True)
    assert list(table().columns) == list(COLUMNS) and len(final_runs(table())) == 40
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing unfinished stays"


def test_published_numbers_need_five_columns(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(
        "variant,parameters,tokens,flops,loss\nchinchilla,4.4e7,1.25e9,3.3e17,3.2\nchinchilla,74000000.5,2e9,8.9e17,3.0\n"
    )
    found = read_table(path)
    assert found["parameters"].tolist() == [44_000_000, 74_000_000]
    assert found["final"].tolist() == [True, True] and found["run"].is_unique
    assert found["budget"].isna().all(), "what is not told is missing, not zero"
    assert found["width"].isna().all(), "what is not told is missing, not zero"
    assert found["flops_per_token"].tolist() == [3.3e17 / 1.25e9, 8.9e17 / 2e9]


def cell(column: str, value: object, row: int = 4) -> pd.DataFrame:
    changed = table().astype({column: "object"})
    changed.loc[row, column] = value
    return changed


def of_first_run(column: str, value: str) -> pd.DataFrame:
    return table().assign(
        **{column: table()[column].where(table()["run"] != table()["run"].iloc[0], value)}
    )


BAD: dict[str, Callable[[], pd.DataFrame]] = {
    "a loss that is missing": lambda: cell("loss", None),
    "a loss that is NaN": lambda: cell("loss", "nan"),
    "a loss that is text": lambda: cell("loss", "3,2"),
    "no tokens": lambda: cell("tokens", 0),
    "parameters in millions": lambda: cell("parameters", 44.5),
    "two runs of one configuration": lambda: of_first_run(
        "config_hash", table()["config_hash"].iloc[5]
    ),
    "two tokenizers": lambda: of_first_run("tokenizer", "other"),
    "two data sets": lambda: of_first_run("data", "other"),
    "a step twice": lambda: pd.concat([table(), table().iloc[:1]]),
    "two ends": lambda: cell("final", True, 3),
    "no loss column": lambda: table().drop(columns="loss"),
    "a misspelt column": lambda: table().rename(columns={"tokens": "token"}),
    "no rows": lambda: table().iloc[:0],
}


def test_a_bad_table_is_refused_by_line_and_column(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "runs.csv"

    def refused(file: Path = path) -> None:
        with pytest.raises(ConfigError) as caught:
            read_table(file)
        assert str(caught.value).startswith(str(file))
        wording(caught.value)

    refused()
    for frame in BAD.values():
        frame().to_csv(path, index=False)
        refused()
    path.write_text("")
    refused()
    path.rename(path.with_suffix(".parquet"))
    refused(path.with_suffix(".parquet"))
