"""``plan``: the same for the same things, refused where another is there, and what it says of the work ahead."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.store.layout import read_plan
from fem_common.errors import UserError
from tests.data_prep.conftest import HF, SHARES, SMALL_UNITS, make_documents, merged_hashes, snapshot, write_parquet


def plan(inputs: list[Path], tokenizer: Path, out: Path, *options: str) -> int:
    return main(["plan", *map(str, inputs), "--tokenizer", str(tokenizer), "--out", str(out), *options])


def test_units_cover_every_row_once(tmp_path: Path, many: Path, corpus: Path, tokenizer: Path) -> None:
    for unit_mb in ("0.001", "0.02", "5"):
        out = tmp_path / unit_mb
        assert plan([many, corpus], tokenizer, out, "--unit-mb", unit_mb) == 0
        made = read_plan(out)
        assert [unit.number for unit in made.units] == list(range(len(made.units)))
        for file, row_groups, rows in ((0, 40, 1600), (1, 4, 400)):
            spans = [unit for unit in made.units if unit.file == file]
            assert [unit.start for unit in spans] == [0, *(unit.stop for unit in spans[:-1])] and spans[-1].stop == row_groups
            assert sum(unit.rows or 0 for unit in spans) == rows == made.files[file].rows
    assert len(read_plan(tmp_path / "0.001").units) == 44 and len(read_plan(tmp_path / "5").units) == 2


def test_the_same_plan_twice_is_unchanged(tmp_path: Path, many: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([many], tokenizer, tmp_path / "a", *SMALL_UNITS) == 0
    said = capsys.readouterr().out
    assert "written" in said and "1 files" in said and "1,600 rows" in said and "40 units" in said and "120 shards" in said
    assert re.search(r"about [\d.]+k tokens .* kB of disk", said)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert plan([many], tokenizer, tmp_path / "a", *SMALL_UNITS) == 0
    again = capsys.readouterr().out
    assert "unchanged" in again and again.splitlines()[1:] == said.splitlines()[1:]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert plan([many], tokenizer, tmp_path / "b", *SMALL_UNITS) == 0
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert {"plan.json", "tokenizer/tokenizer.json"} <= set(snapshot(tmp_path / "a"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-score", "3"], "another --min-score (none there, 3.0 now)"),
        (["--language", "en", "--language", "de"], "another --language (none there, en,de now)"),
        (["--valid-percent", "3"], "another --valid-percent (2.0 there, 3.0 now)"),
        (["--unit-mb", "1"], "another --unit-mb (0.001 there, 1 now)"),
        (["--id-column", "text", "--max-bytes", "99"], "another --id-column (id there, text now), another --max-bytes"),
    ],
)
def test_another_setting_is_named(
    tmp_path: Path, tokenizer: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, row = tmp_path / "a.parquet", {"text": "x" * 2000, "score": 4.0, "language": "en"}
    rows = [row | {"id": f"{number}", "text": f"{number}{'x' * (number % 99)}"} for number in range(400)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=200, use_dictionary=False)
    assert plan([file], tokenizer, tmp_path / "out", *SMALL_UNITS) == 0
    before = snapshot(tmp_path / "out")
    assert plan([file], tokenizer, tmp_path / "out", *SMALL_UNITS, *options) == 2
    error = capsys.readouterr().err
    assert said in error and "--overwrite" in error and error.count("\n") == 1
    assert snapshot(tmp_path / "out") == before
    assert plan([file], tokenizer, tmp_path / "out", *SMALL_UNITS, *options, "--overwrite") == 0
    assert plan([file], tokenizer, tmp_path / "out", *SMALL_UNITS, *options) == 0


def test_other_inputs_and_tokenizers_are_named(
    tmp_path: Path, many: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", write_parquet(tmp_path / "other.parquet", make_documents(9, 9, seed=9))
    assert plan([many, corpus], tokenizer, out) == 0
    spoilt = Path(shutil.copytree(tokenizer, tmp_path / "spoilt"))
    raw = json.loads((spoilt / "tokenizer.json").read_text())
    (spoilt / "tokenizer.json").write_text(json.dumps(raw, indent=None, sort_keys=True))
    for inputs, name, said in (
        ([many], tokenizer, "other inputs (2 there, 1 now)"),
        ([corpus, many], tokenizer, "the same inputs in another order"),
        ([many, other], tokenizer, f"other inputs ({corpus} there, {other} now)"),
        ([many, corpus], spoilt, "another tokenizer"),
    ):
        capsys.readouterr()
        assert plan(inputs, name, out) == 2
        assert f"{out} holds a plan made from {said}" in capsys.readouterr().err


def test_data_of_unknown_origin_stays(tmp_path: Path, many: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("valid.bin", "manifest.json", "units.jsonl", "shards/00000-train.bin", "tokenizer/tokenizer.json")):
        out = tmp_path / str(number)
        (out / name).parent.mkdir(parents=True)
        (out / name).write_bytes(b"{}")
        assert plan([many], tokenizer, out) == 2
        error = capsys.readouterr().err
        assert f"{out / name.replace('/00000-train.bin', '')} exists and no plan.json" in error and error.count("\n") == 1
        assert snapshot(out) == {name: b"{}"}
        assert plan([many], tokenizer, out, "--overwrite") == 0
        capsys.readouterr()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 2}', b'{"format": 2, "units": [[1]]}'])
def test_a_damaged_plan_is_named(tmp_path: Path, many: Path, tokenizer: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UserError, match="plan.json (is damaged|has format 1)"):
        read_plan(tmp_path)
    for arguments in (["run", "--out", str(tmp_path)], ["status", str(tmp_path)], ["merge", str(tmp_path)]):
        assert main(arguments) == 2
        assert "plan.json" in capsys.readouterr().err
    assert plan([many], tokenizer, tmp_path) == 2
    assert plan([many], tokenizer, tmp_path, "--overwrite") == 0
    assert read_plan(tmp_path).units


def test_a_plan_of_any_wrong_shape_is_one_line(tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([corpus], tokenizer, tmp_path) == 0
    file = tmp_path / "plan.json"
    whole, value = file.read_bytes(), json.loads(file.read_bytes())
    free: set[tuple[Any, ...] | None] = {
        ("files", 0, "path"),
        ("files", 0, "bytes"),
        ("files", 0, "rows"),
        ("files", 0, "text_bytes"),
        ("units", 0, 3),
        ("units", 0, 4),
    }
    free |= {("unit_bytes",)}  # these decide no byte of the data

    def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield above
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from places(value[key], (*above, key))

    def put(wrong: Any) -> Callable[[Any, Any], object]:
        return lambda container, key: container.__setitem__(key, wrong)

    def changed(place: tuple[Any, ...], change: Callable[[Any, Any], object]) -> bytes:
        copy = json.loads(whole)
        if not place:
            return b"7"
        container = copy
        for key in place[:-1]:
            container = container[key]
        change(container, place[-1])
        return json.dumps(copy).encode()

    spoilt: list[tuple[bytes, tuple[Any, ...] | None]] = [(whole[:size], None) for size in range(0, len(whole) - 2, 13)]
    spoilt += [(b"[" * 100_000, None), (b"\xff" + whole, None)]
    wrongs: list[Any] = [None, True, 5, -1, 1.5, 10**400, "x", [], {}, [[]], [None] * 5]
    for one in places(value):
        spoilt.append((changed(one, lambda container, key: container.pop(key)), None))
        spoilt += [(changed(one, put(wrong)), one) for wrong in wrongs]
    capsys.readouterr()
    same = json.dumps(value).encode()
    for content, place in spoilt:
        if content == same:
            continue
        file.write_bytes(content)
        code, error = main(["status", str(tmp_path)]), capsys.readouterr().err
        assert (code == 2 and error.startswith("data_prep: error: ") and error.count("\n") == 1) or (code == 0 and place in free), content


def test_overwrite_makes_complete_data_anew_and_goes_on_with_what_a_kill_left(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["run", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, *SMALL_UNITS, *HF]
    assert plan([many], tokenizer, out, *SHARES, *SMALL_UNITS) == 0
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "2", *HF]) == 0
    capsys.readouterr()
    assert main([*command, "--overwrite"]) == 0
    assert "20 of 40 units to do" in capsys.readouterr().out
    (out / "train.bin").write_bytes(bytes((out / "train.bin").stat().st_size))
    assert main([*command, "--overwrite"]) == 0
    assert "40 of 40 units to do" in capsys.readouterr().out
    assert snapshot(out) == snapshot(many_made)


def test_run_goes_on_with_the_plan_and_refuses_what_is_not_in_it(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert plan([many], tokenizer, out, *SHARES, *SMALL_UNITS) == 0
    for options, name in (
        (["--min-bytes", "7"], "min-bytes"),
        (["--language", "en"], "language"),
        (["--unit-mb", "5"], "unit-mb"),
        (["--overwrite"], "overwrite"),
        (["--subset", "x"], "subset"),
    ):
        assert main(["run", "--out", str(out), *options]) == 2
        assert f"--{name} is not that of the plan" in capsys.readouterr().err
    assert main(["run", "--out", str(out), *SHARES, "--tokenizer", str(tokenizer), *HF]) == 0
    assert merged_hashes(out) == merged_hashes(many_made)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "name", ["shards/a.parquet", "shards/below/a.parquet", "tokenizer/a.parquet", ".unfinished/a.parquet", "units.jsonl"]
)
def test_inputs_where_data_prep_writes_are_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, name: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    if name.endswith("parquet"):
        shutil.copy(corpus, out / name)
    else:
        (out / name).write_text('{"id": "a", "text": "mine"}\n')
    shutil.copytree(out, tmp_path / "elsewhere")
    (tmp_path / "link.parquet").symlink_to(out / name)
    (tmp_path / "linked").symlink_to(out)
    before = snapshot(out)
    for verb in ("plan", "run"):
        for file in (out / name, out / name.split("/")[0], f"{out / name}*", tmp_path / "link.parquet", tmp_path / "linked" / name):
            assert main([verb, str(file), "--tokenizer", str(tokenizer), "--out", str(out), *options]) == 2
            error = capsys.readouterr().err
            assert "lies where data_prep writes in --out" in error and error.count("\n") == 1, error
    assert snapshot(out) == before
    all_train = ("--valid-percent", "0", "--test-percent", "0")
    assert plan([tmp_path / "elsewhere" / name], tokenizer, tmp_path / "another", *all_train) == 0


@pytest.mark.parametrize("below", [".", "out"])
def test_out_below_an_input_folder_is_no_input(tmp_path: Path, tokenizer: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": f"a{i}", "text": f"text {i}"} for i in range(90)] + [{"id": "b", "text": None}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / below
    run = ["--tokenizer", str(tokenizer), "--out", str(out), *SHARES, "--max-bad", "100%", *HF]
    assert main(["run", str(tmp_path), *run]) == 0
    before = snapshot(out)
    assert {"units.jsonl", "bad_rows.jsonl"} <= set(before)
    for source in (tmp_path, tmp_path / "**" / "*.jsonl"):
        capsys.readouterr()
        assert main(["run", str(source), *run]) == 0 and "unchanged" in capsys.readouterr().out
        assert snapshot(out) == before
    assert main(["run", str(out / "*s.jsonl"), *run]) == 2
    assert "holds only what data_prep has written" in capsys.readouterr().err
    assert main(["run", str(out / "units.jsonl"), *run, "--overwrite"]) == 2
    assert "lies where data_prep writes" in capsys.readouterr().err
    assert snapshot(out) == before
    assert main(["run", str(tmp_path), *run, "--overwrite"]) == 0
    assert snapshot(out) == before


def test_inputs_that_changed_since_the_plan_are_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(shutil.copy(corpus, tmp_path / "a.parquet"))
    assert plan([file], tokenizer, tmp_path / "out") == 0
    write_parquet(file, make_documents(400, 60, seed=8))
    assert main(["run", "--out", str(tmp_path / "out")]) == 2
    assert "a.parquet has changed since it was planned" in capsys.readouterr().err
    file.unlink()
    assert main(["run", "--out", str(tmp_path / "out")]) == 2
    assert "a.parquet" in capsys.readouterr().err


def test_no_rows_and_no_units(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([write_parquet(tmp_path / "none.parquet", [])], tokenizer, tmp_path / "out") == 2
    assert "no rows in" in capsys.readouterr().err and not (tmp_path / "out").exists()
