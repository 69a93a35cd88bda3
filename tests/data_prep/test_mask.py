"""The mask: what it sees, what it leaves out, and every way in which a person's code can fail."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_prep.encode.documents import Selection, Settings, add_settings_arguments, settings_of
from data_prep.encode.mask import load_mask
from data_prep.sources import Rows
from data_prep.sources.rows import Drop
from fem_common.errors import UserError

DEDUPLICATE = '''
"""Documents that are copies of others, by a list of their ids."""
from pathlib import Path
import pyarrow as pa
import pyarrow.compute as pc

files = ("duplicates.txt",)
duplicates = pa.array(Path(__file__).with_name("duplicates.txt").read_text().split(), pa.large_string())


def keep(batch, places, path):
    return pc.invert(pc.is_in(batch.column("id"), value_set=duplicates))
'''

DECONTAMINATE = '''
"""Documents that share a run of 5 words with an evaluation's questions."""
from pathlib import Path
import numpy as np

N = 5
files = ("questions.txt",)


def grams(text):
    words = text.lower().split()
    return {tuple(words[i : i + N]) for i in range(len(words) - N + 1)}


forbidden = set().union(*map(grams, Path(__file__).with_name("questions.txt").read_text().splitlines()))


def keep(batch, places, path):
    return np.array([forbidden.isdisjoint(grams(text)) for text in batch.column("text").to_pylist()])
'''


def settings_with(mask: Path | str, function: str = "keep", *options: str) -> Settings:
    """What a command line with --mask gives."""
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    return settings_of(parser.parse_args(["--mask", f"{mask}:{function}", *options]))


def write(folder: Path, code: str, **files: str) -> Path:
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    (folder / "mask.py").write_text(code)
    return folder / "mask.py"


def rows(texts: list[bytes | None], **columns: object) -> Rows:
    given = {"text": pa.array(texts, pa.large_binary()), "id": pa.array([f"id-{i}".encode() for i in range(len(texts))], pa.large_binary())}
    return Rows(np.arange(len(texts)) * 10, pa.RecordBatch.from_pydict(given | columns))


def test_deduplication_by_a_list_of_ids(tmp_path: Path) -> None:
    settings = settings_with(write(tmp_path, DEDUPLICATE, duplicates="id-1 id-3 id-99"))
    documents, dropped, bad = Selection(settings).of(rows([b"a", b"a", b"b", b"b", b"c"]), "shard.parquet")
    assert documents.ids.to_pylist() == [b"id-0", b"id-2", b"id-4"]
    assert (dropped, bad) == ({Drop.MASKED: 2}, [])


def test_decontamination_by_n_grams(tmp_path: Path) -> None:
    settings = settings_with(write(tmp_path, DECONTAMINATE, questions="What is the capital of France\nWho wrote it"))
    texts = [b"He asked: what is The capital of Spain?", b"What is the answer", b"the capital of france is the Who wrote it"]
    documents, dropped, _ = Selection(settings).of(rows([*texts]))
    assert documents.texts.to_pylist() == [texts[1].decode(), texts[2].decode()]
    assert dropped == {Drop.MASKED: 1}


def test_mask_sees_the_rows_that_all_else_lets_pass_and_the_columns_it_wants(tmp_path: Path) -> None:
    code = """
columns = ("url", "id")
import numpy as np
seen = []
def keep(batch, places, path):
    seen.append((batch.schema.names, [str(t) for t in batch.schema.types], batch.to_pylist(), places.tolist(), places.dtype.name, path))
    return np.array([row["url"] != "bad" for row in batch.to_pylist()])
"""
    settings = settings_with(write(tmp_path, code), "keep", "--min-bytes", "2")
    assert settings.columns.extra == ("url",)
    selection = Selection(settings)
    part = rows([b"one", None, b"\xff\xff", b"2", b"three", b"four"], url=pa.array(["u0", "u1", "u2", "u3", "bad", "u5"]))
    documents, dropped, _ = selection.of(part, "x.parquet")
    assert documents.texts.to_pylist() == ["one", "four"]
    assert dropped == {Drop.NULL_TEXT: 1, Drop.INVALID_UTF8: 1, Drop.BELOW_MIN_BYTES: 1, Drop.MASKED: 1}
    assert selection.mask is not None
    ((names, types, seen, places, dtype, path),) = selection.mask.function.__globals__["seen"]
    assert dict(zip(names, types, strict=True)) == {"url": "string", "id": "large_string", "text": "large_string"}
    assert seen == [{"url": u, "id": i, "text": t} for u, i, t in (("u0", "id-0", "one"), ("bad", "id-4", "three"), ("u5", "id-5", "four"))]
    assert (places, dtype, path) == ([0, 40, 50], "int64", "x.parquet")


def test_ids_that_are_no_text_reach_the_mask_readable_and_the_documents_unchanged(tmp_path: Path) -> None:
    settings = settings_with(
        write(
            tmp_path,
            "seen = []\ndef keep(batch, places, path):\n    seen.extend(batch['id'].to_pylist())\n    return batch['text'].is_valid()\n",
        )
    )
    selection = Selection(settings)
    batch = pa.RecordBatch.from_pydict({"text": ["a", "b"], "id": pa.array([b"\xff1", b"2"], pa.large_binary())})
    documents, _, _ = selection.of(Rows(np.arange(2), batch))
    assert documents.ids.to_pylist() == [b"\xff1", b"2"]
    assert selection.mask is not None and selection.mask.function.__globals__["seen"] == ["\ufffd1", "2"]


def test_text_as_id_and_rows_without_any_left(tmp_path: Path) -> None:
    code = "def keep(batch, places, path):\n    assert len(places)\n    return [v > 'b' for v in batch['text'].to_pylist()]\n"
    settings = settings_with(
        write(tmp_path, code.replace("[v", "__import__('pyarrow').array([v").replace("()]", "()])")), "keep", "--id-column", "text"
    )
    selection = Selection(settings)
    assert selection.of(rows([b"a", b"c"]))[0].ids.to_pylist() == [b"c"]
    assert selection.of(rows([None, b""]))[1] == {Drop.NULL_TEXT: 1, Drop.EMPTY_TEXT: 1}  # and the mask was not called


def test_hash_covers_the_file_and_what_it_reads_and_a_change_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, DEDUPLICATE, duplicates="id-1")
    settings = settings_with(file)
    assert settings.mask_sha256 == settings_with(file).mask_sha256
    assert "mask.py" not in str(settings.deciding()) and settings.deciding()["mask"] == "keep"
    assert Selection(Settings.from_json(settings.as_json())).mask is not None
    (tmp_path / "duplicates.txt").write_text("id-2")
    with pytest.raises(UserError, match=r"mask.py \(--mask\) or a file it names has changed since"):
        Selection(settings)
    (tmp_path / "duplicates.txt").write_text("id-1")
    Selection(settings)
    file.write_text(DEDUPLICATE + "\n")
    with pytest.raises(UserError, match="has changed"):
        Selection(settings)
    assert settings_with(file).mask_sha256 != settings.mask_sha256


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    load_mask(f"{write(tmp_path, 'def keep(batch, places, path): ...')}:keep")
    assert [path.name for path in tmp_path.iterdir()] == ["mask.py"]


LOADING = {
    "no file": ("absent.py:keep", "no such file: .*absent.py"),
    "no function": ("mask.py:keeep", r"mask.py has no function 'keeep' \(it has: helper, keep\)"),
    "not a function": ("mask.py:number", "has no function 'number'"),
    "no colon": ("mask.py", "must be FILE.py:FUNCTION"),
    "no python": ("mask.txt:keep", "must be FILE.py:FUNCTION"),
    "no identifier": ("mask.py:keep()", "must be FILE.py:FUNCTION"),
    "a folder": ("folder.py:keep", "cannot be read"),
}


@pytest.mark.parametrize("case", LOADING)
def test_mask_that_cannot_be_loaded(tmp_path: Path, case: str) -> None:
    write(tmp_path, "number = 1\ndef helper(): ...\ndef keep(batch, places, path): ...\n")
    (tmp_path / "folder.py").mkdir()
    spec, said = LOADING[case]
    with pytest.raises(UserError, match=said) as raised:
        load_mask(f"{tmp_path}/{spec}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\ny = 1 / 0\ndef keep(b, p, q): ...", "mask.py:2: ZeroDivisionError: division by zero"),
        ("x = 1\ndef keep(b, p, q:\n", "mask.py:2: SyntaxError: "),
        ("import absent_module\n", "mask.py:1: ModuleNotFoundError: No module named 'absent_module'"),
        ("columns = 'url'\ndef keep(b, p, q): ...", "mask.py: columns is 'url'; it must be a tuple of names"),
        ("files = ('gone.txt',)\ndef keep(b, p, q): ...", "mask.py: its file 'gone.txt' cannot be read .*No such file"),
    ],
)
def test_mask_whose_file_fails(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        settings_with(write(tmp_path, code))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('first\\nsecond')", r"mask.py:5: ValueError: first second \(in keep, 3 rows at 0 to 20 of x.parquet\)"),
        ("inner(batch['nothing'])", r"mask.py:5: KeyError: "),
        ("inner(None)", r"mask.py:2: .*Error: .*3 rows at 0 to 20 of x.parquet"),
        ("pass", "keep returned NoneType, not a boolean Arrow or NumPy array"),
        ("return [True] * 3", "keep returned list, not a boolean"),
        ("return np.ones(3)", "keep returned float64, not a boolean"),
        ("return np.ones((3, 1), bool)", r"keep returned bool of shape \(3, 1\), not a boolean"),
        ("return np.ones(2, bool)", "keep returned 2 values for 3 rows"),
        ("return pa.array([1, 0, 1])", "keep returned int64, not a boolean"),
        ("return pa.array([True, None, None])", "keep returned 2 nulls; each row needs true"),
        ("return pa.array([True] * 4)", "keep returned 4 values for 3 rows"),
    ],
)
def test_mask_that_fails_on_rows(tmp_path: Path, body: str, said: str) -> None:
    code = (
        f"def inner(x):\n    return x.nothing()\ndef keep(batch, places, path):\n    import numpy as np; import pyarrow as pa\n    {body}\n"
    )
    selection = Selection(settings_with(write(tmp_path, code)))
    with pytest.raises(UserError, match=said) as raised:
        selection.of(rows([b"a", b"b", b"c"]), "x.parquet")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "answer", ["np.array([True, False, True])", "pa.array([True, False, True])", "pa.chunked_array([[True], [False, True]])"]
)
def test_answers_of_every_allowed_kind(tmp_path: Path, answer: str) -> None:
    code = f"import numpy as np\nimport pyarrow as pa\ndef keep(batch, places, path):\n    return {answer}\n"
    documents, dropped, _ = Selection(settings_with(write(tmp_path, code))).of(rows([b"a", b"b", b"c"]))
    assert documents.texts.to_pylist() == ["a", "c"]
    assert dropped == {Drop.MASKED: 1}
