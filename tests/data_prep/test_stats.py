"""stats: every figure against numpy's on the plain list of lengths; the table, the JSON and the picture."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from data_prep.__main__ import main
from data_prep.report.lengths import COUNTED_BELOW, Lengths, count_lengths
from data_prep.store.indexed import read_index
from tests.data_prep.conftest import write_parquet
from tests.data_prep.units_made import encode_units, merge, plan_folder, rows_with_faults


def some_lengths(case: str) -> npt.NDArray[np.int32]:
    random_ = np.random.default_rng(5)
    drawn = {
        "like text": np.clip(random_.lognormal(6.4, 1.0, 5000), 1, None),
        "one": [17],
        "all the same": [8] * 50,
        "one token each": [1] * 9,
        "very long": [3, COUNTED_BELOW - 1, COUNTED_BELOW, COUNTED_BELOW, COUNTED_BELOW + 5, 2**31 - 1],
    }
    return np.array(drawn[case], dtype=np.int32)


CASES = ("like text", "one", "all the same", "one token each", "very long")


def of(values: npt.NDArray[np.int32], parts: int = 1) -> Lengths:
    return count_lengths(np.array_split(values, parts), lambda number: None)


@pytest.mark.parametrize("case", CASES)
def test_figures_are_numpys(case: str) -> None:
    values = some_lengths(case)
    lengths, long = of(values), values.astype(np.int64)
    assert lengths.total == len(values) and lengths.tokens == int(long.sum())
    assert np.repeat(lengths.values, lengths.documents).tolist() == sorted(values.tolist())
    for share in (0.001, 0.05, 0.25, 0.5, 0.9, 0.999, 1.0):
        assert lengths.quantile(share) == np.quantile(values, share, method="inverted_cdf")
        below = np.sort(long)[: np.searchsorted(np.cumsum(np.sort(long)), share * long.sum()) + 1]
        assert lengths.token_quantile(share) == below[-1]
    for mark in (0, 1, 8, 17, 512, COUNTED_BELOW, 2**31):
        short = long[long <= mark]
        assert lengths.at_most(mark) == (len(short) / len(long), int(short.sum()) / int(long.sum()))


@pytest.mark.parametrize("case", CASES)
def test_parts_and_sums_do_not_show(case: str) -> None:
    values = some_lengths(case)
    whole = of(values)
    half = len(values) // 2
    for other in (of(values, 3), of(values[::-1].copy()), of(values[:half]) + of(values[half:]), of(values[:0]) + of(values)):
        assert np.array_equal(other.values, whole.values) and np.array_equal(other.documents, whole.documents)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("stats")
    files = [write_parquet(folder / f"{name}.parquet", rows_with_faults(120, seed), row_group_size=50) for seed, name in enumerate("ab")]
    out = encode_units(plan_folder(folder / "data", files, tokenizer, "--unit-mb", "0.001"))
    assert merge(out) == 0
    return out


def test_json_adds_up(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(data), "--json", "--files"]) == 0
    said = json.loads(capsys.readouterr().out)
    manifest = json.loads((data / "manifest.json").read_text())
    lengths = {name: read_index(data / f"{name}.idx").lengths for name in ("train", "valid", "test")}
    for name, split in said["splits"].items():
        assert {key: split[key] for key in ("documents", "tokens", "text_bytes")}.items() <= manifest["splits"][name].items()
        assert split["bytes_per_token"] == split["text_bytes"] / split["tokens"]
        assert split["lengths"]["longest"] == lengths[name].max() and split["lengths"]["mean"] == pytest.approx(lengths[name].mean())
    every = np.concatenate(list(lengths.values()))
    assert said["all"]["lengths"]["documents"] == len(every) == 240 and said["all"]["lengths"]["tokens"] == every.sum()
    assert said["all"]["lengths"]["quantiles"]["0.5"] == np.quantile(every, 0.5, method="inverted_cdf")
    assert said["all"]["lengths"]["at_most"]["128"]["documents"] == pytest.approx((every <= 128).mean())
    assert said["dropped"] == manifest["source"]["dropped"] and said["rows"] == 240 + sum(said["dropped"].values())
    assert [Path(file["path"]).name for file in said["files"]] == ["a.parquet", "b.parquet"]
    for key in ("rows", "documents", "tokens", "text_bytes"):
        whole = said["rows"] if key == "rows" else sum(split[key] for split in said["splits"].values())
        assert sum(file[key] for file in said["files"]) == whole
    assert all(file["rows"] == file["documents"] + sum(file["dropped"].values()) for file in said["files"])


def test_the_table_says_it_to_people(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(data), "--files"]) == 0
    output = capsys.readouterr().out
    manifest = json.loads((data / "manifest.json").read_text())
    for name, entry in manifest["splits"].items():
        assert re.search(rf"^{name} +{entry['documents']:,} +{entry['tokens']:,} ", output, re.MULTILINE), output
    dropped = manifest["source"]["dropped"]
    assert f"{manifest['source']['rows']:,} rows = 240 documents + {sum(dropped.values())} dropped" in output
    assert all(re.search(rf"^ +{number} {reason} \(", output, re.MULTILINE) for reason, number in dropped.items()) and len(dropped) == 2
    assert "a.parquet: " in output and "b.parquet: " in output


def test_the_picture_is_drawn(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib import image

    path = tmp_path / "deeper" / "lengths.png"
    assert main(["stats", str(data), "--picture", str(path)]) == 0
    pixels = image.imread(io.BytesIO(path.read_bytes()))
    assert pixels.shape[0] >= 800 and pixels.shape[1] >= 1200
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    assert str(path) in capsys.readouterr().err
    again = tmp_path / "again.png"
    assert main(["stats", str(data), "--picture", str(again)]) == 0
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_every_distribution_can_be_drawn(case: str) -> None:
    from data_prep.report.lengths import draw_lengths

    assert draw_lengths(of(some_lengths(case)), case, (128, 4096)).startswith(b"\x89PNG")


def test_mistakes_are_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["stats", str(data), "--picture", "a.jpg"], "a.jpg does not end in .png"),
        (["stats", str(tmp_path)], "no manifest.json in"),
        (["stats", str(tmp_path / "none")], "no such folder"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("damage", [lambda raw: raw[:-8], lambda raw: raw[:34] + b"\2\0\0\0" + raw[38:]])
def test_a_damaged_index_is_named(data: Path, tmp_path: Path, damage, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    import shutil

    out = Path(shutil.copytree(data, tmp_path / "data"))
    (out / "test.idx").write_bytes(damage((out / "test.idx").read_bytes()))
    assert main(["stats", str(out)]) == 2
    error = capsys.readouterr().err
    assert "test.idx" in error and "verify" in error and error.count("\n") == 1
