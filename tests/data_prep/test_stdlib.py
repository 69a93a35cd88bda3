"""The corpus that every machine has."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.verbs.stdlib import SCHEMA, collect, source_files


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stdlib") / "new" / "stdlib.parquet"
    assert main(["stdlib", str(out)]) == 0
    return out


def test_schema_size_and_row_groups(stdlib: Path) -> None:
    file = pq.ParquetFile(stdlib, page_checksum_verification=True)
    assert file.schema_arrow.equals(SCHEMA)
    assert file.num_row_groups >= 3
    table = file.read()
    texts = table.column("text").to_pylist()
    # 10.7 MB on Debian's trimmed Python 3.11, 11.3 to 11.8 MB on CPython 3.10 to 3.13
    assert 9e6 < sum(len(text.encode()) for text in texts) < 20e6
    assert len(set(texts)) == len(texts)
    assert len(set(table.column("id").to_pylist())) == len(texts)


def test_texts_are_the_librarys_and_no_row_names_this_machine(stdlib: Path) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    rows = pq.read_table(stdlib).to_pylist()
    for row in rows[::37]:
        assert (root / row["file_path"]).read_bytes().decode() == row["text"]
    version = ".".join(map(str, sys.version_info[:3]))
    for row in rows:
        parts = row["file_path"].split("/")
        assert not row["file_path"].startswith("/") and ".." not in parts
        assert not {"site-packages", "test", "tests", "lib2to3", "__pycache__"} & set(parts)
        assert row["id"] == f"stdlib/{row['file_path']}"
        assert row["url"].startswith(f"https://github.com/python/cpython/blob/v{version}")
    assert {"os.py", "asyncio/base_events.py", "json/decoder.py"} <= {row["file_path"] for row in rows}


def test_same_bytes_again_and_the_file_is_left(stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stdlib", str(tmp_path / "again.parquet")]) == 0
    assert (tmp_path / "again.parquet").read_bytes() == stdlib.read_bytes()
    assert main(["stdlib", str(tmp_path / "again.parquet")]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["again.parquet"]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    for name, content in {
        "b.py": b"x = 1\n",
        "a/c.py": b"x = 1\n",
        "a/d.py": b"y = '\xc3\xa9'\n",
        "a/e.py": b"# -*- coding: latin-1 -*-\nz = '\xe9'\n",
        "a/__init__.py": b"\n",
        "a/test/t.py": b"t = 1\n",
        "site-packages/p.py": b"p = 1\n",
        "config-3.11-linux/python-config.py": b"c = 1\n",
        "_sysconfigdata__linux_.py": b"s = 1\n",
        "notes.txt": b"n\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (tmp_path / "elsewhere.py").write_text("e = 1\n")
    (root / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    assert list(source_files(root)) == ["b.py", "a/__init__.py", "a/c.py", "a/d.py", "a/e.py"]
    table, dropped = collect(root)
    assert table.column("file_path").to_pylist() == ["b.py", "a/d.py"]
    assert dropped == {"duplicate": 1, "not UTF-8": 1, "empty": 1}
