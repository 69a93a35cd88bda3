"""data_prep's benchmark: what it counts, compares and concludes. How long anything takes is not looked at."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.store.indexed import read_index
from data_prep.verbs.stdlib import SCHEMA
from fem_common.errors import UserError
from tools.bench.data_prep import __main__ as bench
from tools.bench.data_prep import corpus, encoding, index, peers, report
from tools.bench.data_prep.processes import BenchError, Neighbours, Spread, Usage, run

SMALL = bench.Effort({"prose": 1}, (("prose", "llama"),), 1, 1, 30_000, again=1, vocab_size=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the bench keeps its corpora and tokenizers."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """A run on 1 MB of text, against the datatrove of this environment, as JSON."""
    words = ["--peers", sys.prefix, "--only", "encoding", "workers", "--json", str(folder / "found.json")]
    assert bench.main(words, SMALL, folder) in (0, 1)
    content: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return content


# --- a whole run -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_side_wrote_the_same_bytes(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    for comparison in found["comparisons"]:
        assert [side["name"] for side in comparison["sides"]] == [pipeline.name for pipeline in peers.PIPELINES]
        hashes = [digest for side in comparison["sides"] for digest in side["sha256"]]
        assert len(hashes) == len(peers.PIPELINES) and len(set(hashes)) == 1
        assert all(side["cpu"][0] > 0 and side["startup"][0] > 0 and side["peak_bytes"] > 30e6 for side in comparison["sides"])
        assert 1.5 < comparison["bytes_per_token"] < 6


@pytest.mark.slow
def test_every_figure_has_a_target_and_a_verdict(found: dict[str, Any]) -> None:
    assert len(found["figures"]) == 3 + 1
    assert all((figure["least"] is None) != (figure["most"] is None) for figure in found["figures"])
    assert {figure["verdict"] for figure in found["figures"]} <= set(report.Verdict)
    assert found["machine"]["packages"].keys() >= {"gigatoken", "tokenizers"} and found["seconds"] > 0
    assert [one["name"] for one in found["corpora"]] == ["prose"]
    for breakdown in found["breakdowns"]:
        assert len(breakdown["seconds"]) == 6 and min(breakdown["seconds"].values()) >= 0


@pytest.mark.slow
def test_nothing_is_left_but_what_later_runs_use(found: dict[str, Any], folder: Path) -> None:
    assert found and sorted(path.name for path in folder.iterdir()) == ["corpora", "found.json", "tokenizers"]


@pytest.mark.slow
def test_other_bytes_are_found_and_fail_the_run(found: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """A tokenizer with another EOD gives the baseline other bytes; a side with other bytes is named and costs the exit code."""
    made = corpus.Corpus(**found["corpora"][0])
    kit = peers.make_kit("llama", next(folder.glob("tokenizers/llama-*/")))
    right = encoding.once(peers.BASELINE, made.tiny, kit, Path(), tmp_path)
    wrong = replace(kit, folder=replace(kit.folder, eod_id=kit.folder.eod_id + 1))
    other = encoding.once(peers.BASELINE, made.tiny, wrong, Path(), tmp_path)
    assert right[1] != other[1] and right[2] == other[2]


def test_a_side_with_other_bytes_is_named_and_fails_the_run(tmp_path: Path) -> None:
    results = some_results()
    comparison = results.comparisons[0]
    for number, side in enumerate(comparison.sides):
        sides = list(comparison.sides)
        sides[number] = replace(side, sha256=("other", "other"))
        changed = replace(comparison, sides=tuple(sides))
        assert side.name in changed.differing or side.name == peers.BASELINE.name
        assert len(changed.differing) == (len(sides) - 1 if side.name == peers.BASELINE.name else 1)
        assert conclude(report.Results(comparisons=[changed]), tmp_path) == 1
    between = replace(comparison, sides=tuple(replace(side, sha256=("a", "b")) for side in comparison.sides))
    assert len(between.differing) == len(comparison.sides)
    assert conclude(results, tmp_path) == 0


# --- conclusions -----------------------------------------------------------------------------------------------------------------


def some_results() -> report.Results:
    """Results that meet every target."""
    rates = {peers.OURS: 30.0, peers.FALLBACK: 4.0, peers.BASELINE: 3.5, peers.PEER: 3.4}
    sides = [encoding.Side(one.name, (rate, 1.01 * rate), (9.0, 8.9), (1.0, 1.0), 10**8, ("a", "a")) for one, rate in rates.items()]
    usage, startup = Usage(30.0, 35.0, 3 * 10**9), Usage(10.0, 10.0, 10**9)
    return report.Results(
        corpora=[corpus.Corpus("prose", "words", "", "", 100, 10**6, 10, 10**5, 3000.0, 4800.0)],
        comparisons=[encoding.Comparison("prose", "llama", tuple(sides), 4.0)],
        scaling=encoding.Scaling((1.9, 1.95), ((2.0, 1.0), (2.0, 1.0)), 0.01, 0.2, 2),
        indexing=[index.Indexing(index.DOCUMENTS, index.TOKENS, usage, startup, 10**9)],
        reads=[50_000.0],
        items=[9_000.0],
    )


def conclude(results: report.Results, tmp_path: Path) -> int:
    """The exit code of a run with these results."""
    run_of = bench.Bench(SMALL, tmp_path, tmp_path, None, None)
    run_of.results = results
    return bench.conclude(run_of, bench.parse(["--json", str(tmp_path / "conclusion.json")]))


def verdicts(results: report.Results) -> list[str]:
    """What the figures come to, those that pass left out."""
    return [figure.verdict for figure in results.figures() if figure.verdict != report.Verdict.PASS]


def test_what_meets_every_target_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = some_results()
    assert len(results.figures()) == 3 + 1 + 2 + 1 and verdicts(results) == []
    assert conclude(results, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "ours ÷ datatrove" in printed and "| pass" in printed and "FAIL" not in printed


@pytest.mark.parametrize(
    ("side", "factor", "missed"),
    [(peers.OURS, 0.55, 2), (peers.OURS, 0.63, 1), (peers.FALLBACK, 0.85, 1), (peers.OURS, math.nan, 2)],
)
def test_a_slow_side_fails(side: peers.Pipeline, factor: float, missed: int, tmp_path: Path) -> None:
    results = some_results()
    comparison = results.comparisons[0]
    sides = tuple(
        replace(one, rates=tuple(factor * rate for rate in one.rates)) if one.name == side.name else one for one in comparison.sides
    )
    results.comparisons = [replace(comparison, sides=sides)]
    assert verdicts(results) == ["FAIL"] * missed
    assert conclude(results, tmp_path) == 1


def test_workers_fail_on_an_idle_machine_and_are_a_note_on_another(tmp_path: Path) -> None:
    results = some_results()
    assert results.scaling is not None
    slow = replace(results.scaling, speedups=(1.5, 1.6))
    for scaling, verdict, code in (
        (slow, "FAIL", 1),
        (replace(slow, others=0.5), "note", 0),
        (replace(slow, others=None), "note", 0),
        (replace(slow, cores=1), "note", 0),
    ):
        results.scaling = scaling
        assert verdicts(results) == [verdict] and conclude(results, tmp_path) == code
    results.scaling = replace(results.scaling, speedups=(2.9, 2.9), others=0.5)  # good for the same bad reason
    assert verdicts(results) == ["note"]


def test_the_index_is_held_to_its_share_of_the_targets() -> None:
    results = some_results()
    whole = results.indexing[0]
    results.indexing = [replace(whole, whole=replace(whole.whole, cpu=41.0))]
    assert verdicts(results) == ["FAIL"]
    results.indexing = [replace(whole, whole=replace(whole.whole, peak_bytes=4_100_000_000))]
    assert verdicts(results) == ["FAIL"]
    tenth = replace(whole, documents=index.DOCUMENTS // 10, tokens=index.TOKENS // 10)
    results.indexing = [replace(tenth, whole=Usage(13.0, 12.9, 1_290_000_000))]  # 2.9 of 3 s, 1.29 of 1.3 GB
    assert verdicts(results) == []
    results.indexing = [replace(tenth, whole=Usage(14.0, 13.1, 1_310_000_000))]
    assert verdicts(results) == ["FAIL", "FAIL"]
    assert all("scaled" in figure.remark for figure in results.figures() if figure.what.startswith("index"))
    results = some_results()
    results.reads = [19_000.0]
    assert verdicts(results) == ["FAIL"]


def test_the_table_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    for _ in range(2):
        report.write_table(page, report.render(some_results()))
        lines = page.read_text().splitlines()
        assert lines[:2] == ["above", report.BEGIN] and lines[-2:] == [report.END, "below"] and "old" not in lines
    page.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        report.write_table(page, "")
    assert report.BEGIN in bench.PAGE.read_text(encoding="utf-8") and report.END in bench.PAGE.read_text(encoding="utf-8")


# --- what is counted -------------------------------------------------------------------------------------------------------------

BURN = "import time\nwhile time.process_time() < 0.2: pass"
HOLD = "held = b'x' * (300 << 20)"


def test_a_command_is_charged_for_its_children_and_not_for_who_started_it(tmp_path: Path) -> None:
    held = np.ones(60_000_000)  # 480 MB of this process
    usage = run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"], tmp_path)
    assert 0.2 <= usage.cpu < 60 and usage.wall > 0.1
    assert 2e6 < usage.peak_bytes < held.nbytes / 2
    usage = run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"], tmp_path)
    assert 300 << 20 <= usage.peak_bytes < 450 << 20


def test_a_commands_work_is_ours_and_not_the_neighbours(tmp_path: Path) -> None:
    before = Neighbours()
    usage = run([sys.executable, "-c", BURN.replace("0.2", "0.5")], tmp_path)
    after = Neighbours()
    assert usage.cpu >= 0.5 and after.own - before.own >= usage.cpu - 0.01
    if before.busy is not None and after.busy is not None:
        assert after.busy - before.busy >= usage.cpu - 0.1  # it is counted in hundredths, on each core
        assert 0 <= (before.cores() or 0.0) < 1e4


def test_a_failed_command_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)exit code 3.*so it is"):
        run([sys.executable, "-c", "import sys; print('so it is'); sys.exit(3)"], tmp_path)
    with pytest.raises(BenchError, match="exit code 137"):
        run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path)


def test_peers_of_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = peers.environment(Path(sys.prefix), tmp_path)
    assert peers.versions(python)["datatrove"] == peers.DATATROVE_VERSION
    monkeypatch.setattr(peers, "DATATROVE_VERSION", "0.0.1")
    with pytest.raises(UserError, match=r"needed: datatrove 0\.0\.1"):
        peers.versions(python)
    with pytest.raises(UserError, match="no Python environment"):
        peers.environment(tmp_path, tmp_path)
    assert bench.main(["--corpus", str(tmp_path / "absent")], SMALL, tmp_path) == 2


def test_a_spread_is_of_all_rounds() -> None:
    spread = Spread.of([4.0, 5.0, 3.0])
    assert (spread.median, spread.least, spread.most, spread.rounds, spread.share) == (4.0, 3.0, 5.0, 3, 0.5)


# --- text ------------------------------------------------------------------------------------------------------------------------


def contents(folder: str) -> list[dict[str, Any]]:
    """All rows of a corpus."""
    rows: list[dict[str, Any]] = pq.read_table(folder, schema=SCHEMA).to_pylist()
    return rows


@pytest.mark.parametrize("name", [pytest.param("prose", marks=pytest.mark.slow), "code"])
def test_a_corpus_is_the_same_each_time_and_has_fineweb_edus_lengths(name: str, tmp_path: Path) -> None:
    first, second = (corpus.make(name, 2, tmp_path / part) for part in ("a", "b"))
    rows = contents(first.folder)
    assert rows == contents(second.folder)
    assert len(rows) == first.documents and sum(len(row["text"].encode()) for row in rows) == first.text_bytes
    assert abs(first.text_bytes - 2e6) < 2e5
    assert len({row["text"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    assert contents(first.tiny) == rows[: first.tiny_documents]
    assert abs(first.median_bytes / corpus.MEDIAN - 1) < 0.3 and abs(first.mean_bytes / corpus.MEAN - 1) < 0.3
    again = corpus.make(name, 2, tmp_path / "a")
    assert again == first
    assert len(list(Path(first.folder).glob("*.parquet"))) == corpus.FILES


def test_cutting_loses_nothing_but_the_end_and_cuts_at_line_ends() -> None:
    rng = np.random.default_rng(0)

    def pieces() -> Iterator[tuple[str, str]]:
        for number, size in enumerate(sizes):
            yield str(number), "".join("x" * int(width) + "\n" for width in widths[:size])

    for _ in range(200):
        widths, sizes = rng.integers(0, 30, 50), rng.integers(0, 50, 20)
        wanted = [int(length) for length in rng.integers(1, 400, 2000)]
        texts = [text for _, text in corpus.cut(pieces(), iter(wanted))]
        whole = "".join(text for _, text in pieces())
        assert whole.startswith("".join(texts)) and len(whole) - sum(map(len, texts)) <= 430
        for text, length in zip(texts, wanted, strict=False):
            assert text.endswith("\n") and length <= len(text) <= length + 31


def test_a_given_corpus_is_its_rows_that_have_text(tmp_path: Path) -> None:
    texts = [f"text {n}\n" * 9 for n in range(40)]
    pq.write_table(pa.table({"id": [*range(40), 40, 41], "text": [*texts, None, ""], "other": [1] * 42}), tmp_path / "given.parquet")
    made = corpus.make("given", 1, tmp_path / "cache", tmp_path / "given.parquet")
    assert [row["text"] for row in contents(made.folder)] == texts
    pq.write_table(pa.table({"words": texts}), tmp_path / "wrong.parquet")
    with pytest.raises(UserError, match="columns text and id"):
        corpus.make("given", 1, tmp_path / "cache", tmp_path / "wrong.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no .parquet"):
        corpus.make("given", 1, tmp_path / "cache", tmp_path / "empty")


# --- the index and reading back --------------------------------------------------------------------------------------------------


def test_the_synthetic_pair_is_whole_in_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for chunk in (10_000, 333):
        monkeypatch.setattr(index, "CHUNK", chunk)
        tokens = index.write_pair(tmp_path / "train", 1000)
        made = read_index(tmp_path / "train.idx")
        assert len(made.lengths) == 1000 and made.dtype == "uint16" and int(np.sum(made.lengths, dtype=np.int64)) == tokens
        np.testing.assert_array_equal(made.pointers[1:], 2 * np.cumsum(made.lengths, dtype=np.int64)[:-1])
        np.testing.assert_array_equal(made.document_indices, np.arange(1001))
        assert (tmp_path / "train.bin").stat().st_size == 2 * tokens
        assert 0.8 < tokens / 1000 / (index.TOKENS / index.DOCUMENTS) < 1.25
        hashes.add(hashlib.sha256((tmp_path / "train.idx").read_bytes()).hexdigest())
    assert len(hashes) == 1


@pytest.mark.slow
def test_indexing_and_reading_back(folder: Path, found: dict[str, Any]) -> None:
    words = ["--only", "index", "reading", "--json", str(folder / "slow.json")]
    assert found and bench.main(words, SMALL, folder) in (0, 1)
    slow = json.loads((folder / "slow.json").read_text())
    (indexing,) = slow["indexing"]
    assert indexing["documents"] == 30_000 and indexing["cache_bytes"] > 4 * 30_000
    assert len(slow["reads"]) == len(slow["items"]) == 3 and min(slow["reads"]) > 0
