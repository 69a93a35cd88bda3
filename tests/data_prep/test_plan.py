"""Tests of ``plan``: the same plan for the same inputs, refusal to replace another plan, and the
summary of the work.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.prepared.layout import read_plan
from tests.data_prep import conftest as base


def words(inputs: list[Path], tokenizer: Path, out: Path, *options: str) -> list[object]:
    return ["plan", *inputs, f"--tokenizer {tokenizer} --out {out}", *options]


def test_the_same_plan_twice_is_unchanged(tmp_path: Path, many: Path, tokenizer: Path) -> None:
    command = words([many], tokenizer, tmp_path / "a", base.SMALL_UNITS)
    output = base.done(*command)
    assert all(
        part in output for part in ("written", "1 files", "1,600 rows", "40 units", "120 shards")
    )
    assert re.search(r"about [\d.]+k tokens .* kB of disk", output)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    again = base.done(*command)
    assert "unchanged" in again and again.splitlines()[1:] == output.splitlines()[1:]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert {"plan.json", "tokenizer/tokenizer.json"} <= set(base.snapshot(tmp_path / "a"))


OTHER = """
--min-score 3 | another --min-score (none in the plan, 3.0 now)
--language en --language de | another --language (none in the plan, en,de now)
--valid-percent 3 | another --valid-percent (2.0 in the plan, 3.0 now)
--unit-mb 1 | another --unit-mb (0.001 in the plan, 1 now)
--id-column text --min-bytes 2 | another --id-column (id in the plan, text now), another --min-bytes
"""


def test_what_makes_another_plan_is_named(
    tmp_path: Path, many: Path, corpus: Path, tokenizer: Path
) -> None:
    row = {"text": "x" * 2000, "score": 4.0, "language": "en"}
    rows = [
        row | {"id": f"{number}", "text": f"{number}{'x' * (number % 99)}"} for number in range(400)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=200, use_dictionary=False
    )
    command = words([tmp_path / "a.parquet"], tokenizer, tmp_path / "out", base.SMALL_UNITS)
    for case in OTHER.strip().splitlines():
        options, output = case.split(" | ")
        base.done(*command, "--overwrite")
        before = base.snapshot(tmp_path / "out")
        error = base.refused(*command, options)
        assert (
            output in error and "--overwrite" in error and base.snapshot(tmp_path / "out") == before
        )
        base.done(*command, options, "--overwrite")
        assert "unchanged" in base.done(*command, options)
    out = tmp_path / "inputs"
    other = base.write_parquet(tmp_path / "other.parquet", base.make_documents(9, 9, seed=9))
    base.done(*words([many, corpus], tokenizer, out))
    spoilt = base.copied(tokenizer, tmp_path / "spoilt")
    base.edit_json(spoilt / "tokenizer.json", lambda spec: None)
    for inputs, name, output in (
        ([many], tokenizer, "other inputs (2 in the plan, 1 now)"),
        ([corpus, many], tokenizer, "the same inputs in another order"),
        ([many, other], tokenizer, f"other inputs ({corpus} in the plan, {other} now)"),
        ([many, corpus], spoilt, "another tokenizer"),
    ):
        assert f"{out} contains a plan with {output}" in base.refused(*words(inputs, name, out))


def test_data_of_unknown_origin_and_a_damaged_plan_stay(
    tmp_path: Path, many: Path, tokenizer: Path
) -> None:
    names = "valid.bin manifest.json units.jsonl shards/00000-train.bin tokenizer/tokenizer.json"
    for name in (*names.split(), "plan.json"):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_bytes(b"{}")
        error = base.refused(*words([many], tokenizer, out))
        output = (
            "plan.json is damaged"
            if name == "plan.json"
            else f"{name.replace('/00000-train.bin', '')} exists without a plan.json"
        )
        assert output in error and base.snapshot(out) == {name: b"{}"}
        base.done(*words([many], tokenizer, out, "--overwrite"))
        assert read_plan(out).units


def test_overwrite_makes_complete_data_anew_and_continues_with_what_a_kill_left(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path
) -> None:
    out = base.encode_units(
        base.plan_folder(tmp_path / "out", [many], tokenizer, base.SMALL_UNITS), range(20)
    )
    files = f"--tokenizer {tokenizer} --out {out} --overwrite"
    command = ["run", many, files, base.SHARES, base.SMALL_UNITS, base.HF]
    assert "20 of 40 units to do" in base.done(*command)
    (out / "train.bin").write_bytes(bytes((out / "train.bin").stat().st_size))
    assert "40 of 40 units to do" in base.done(*command)
    assert base.snapshot(out) == base.snapshot(many_made)


def test_run_continues_with_the_plan_and_refuses_what_is_not_in_it(
    tmp_path: Path, rows: Path, tokenizer: Path, merged: Path
) -> None:
    out = base.plan_folder(tmp_path / "out", [rows], tokenizer, base.SMALL_UNITS)
    for option in ("--min-bytes 7", "--language en", "--unit-mb 5", "--overwrite", "--subset x"):
        error = base.refused("run", "--out", out, option)
        assert f"{option.split()[0]} differs from the plan" in error
    options = f"--tokenizer {tokenizer} --out {out} --max-bad 100%"
    base.done("run", options, base.SHARES, base.HF)
    assert base.snapshot(out) == base.snapshot(merged)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "name",
    ["shards/below/a.parquet", "tokenizer/a.parquet", ".unfinished/a.parquet", "units.jsonl"],
)
def test_inputs_where_data_prep_writes_are_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, name: str, options: list[str]
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(
        corpus.read_bytes() if name.endswith("parquet") else b'{"id": "a", "text": "mine"}\n'
    )
    base.copied(out, tmp_path / "elsewhere")
    (tmp_path / "link.parquet").symlink_to(out / name)
    (tmp_path / "linked").symlink_to(out)
    before, top = base.snapshot(out), name.split("/")[0]
    for verb in ("plan", "run"):
        for file in (
            out / name,
            out / top,
            Path(f"{out / name}*"),
            tmp_path / "link.parquet",
            tmp_path / "linked" / name,
        ):
            error = base.refused(verb, *words([file], tokenizer, out, *options)[1:])
            assert "is at a path that data_prep writes in --out" in error, error
    assert base.snapshot(out) == before
    base.done(
        *words([tmp_path / "elsewhere" / name], tokenizer, tmp_path / "another", base.ALL_TRAIN)
    )


@pytest.mark.parametrize("below", [".", "out"])
def test_out_below_an_input_folder_is_no_input(tmp_path: Path, tokenizer: Path, below: str) -> None:
    rows = [{"id": f"a{i}", "text": f"text {i}"} for i in range(90)] + [{"id": "b", "text": None}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / below
    options = [f"--tokenizer {tokenizer} --out {out}", base.SHARES, "--max-bad 100%", base.HF]
    base.done("run", tmp_path, *options)
    before = base.snapshot(out)
    assert {"units.jsonl", "bad_rows.jsonl"} <= set(before)
    for source in (tmp_path, tmp_path / "**" / "*.jsonl"):
        assert "unchanged" in base.done("run", source, *options) and base.snapshot(out) == before
    assert "contains only files that data_prep wrote" in base.refused(
        "run", out / "*s.jsonl", *options
    )
    assert "is at a path that data_prep writes" in base.refused(
        "run", out / "units.jsonl", *options, "--overwrite"
    )
    assert base.snapshot(out) == before
    base.done("run", tmp_path, *options, "--overwrite")
    assert base.snapshot(out) == before


def test_inputs_that_changed_since_the_plan_are_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    file = Path(shutil.copy(corpus, tmp_path / "a.parquet"))
    out = base.plan_folder(tmp_path / "out", [file], tokenizer)
    base.write_parquet(file, base.make_documents(400, 60, seed=8))
    assert "a.parquet has changed since it was planned" in base.refused("run", "--out", out)
    file.unlink()
    assert "a.parquet" in base.refused("run", "--out", out)
