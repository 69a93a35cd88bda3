"""Tests of data_prep's benchmark: its counts, comparisons and conclusions. Durations are not
checked.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.prepared.indexed import read_index
from fem_common.errors import UserError
from tools.bench.data_prep import __main__ as bench
from tools.bench.data_prep import corpus, encoding, index, peers, report
from tools.bench.data_prep.processes import BenchError, Usage, run

SMALL = bench.Effort({"prose": 1}, (("prose", "llama"),), 1, 1, 30_000, again=1, vocab_size=1000)
RATES = {peers.OURS: 30.0, peers.FALLBACK: 4.0, peers.BASELINE: 3.5, peers.PEER: 3.4}


@pytest.mark.slow
def test_a_whole_run_finds_the_same_bytes_on_every_side(tmp_path: Path) -> None:
    assert bench.main(
        ["--peers", sys.prefix, "--json", str(tmp_path / "found.json")], SMALL, tmp_path
    ) in (0, 1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (
        found["faults"] == []
        and found["indexing"][0]["documents"] == 30_000
        and min(found["reads"]) > 0
    )
    (comparison,) = found["comparisons"]
    assert (
        len({digest for side in comparison["sides"] for digest in side["sha256"]}) == 1
        and 1.5 < comparison["bytes_per_token"] < 6
    )
    assert [side["name"] for side in comparison["sides"]] == [
        pipeline.name for pipeline in peers.PIPELINES
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpora",
        "found.json",
        "tokenizers",
    ]


def conclude(
    factors: dict[str, float],
    digests: dict[str, str],
    cpu: float,
    others: float | None,
    folder: Path,
) -> tuple[int, list[str]]:
    """Return exit code and failed verdicts of a run with some wrong values."""
    named = [(one.name, rate * factors.get(one.name, 1)) for one, rate in RATES.items()]
    sides = tuple(
        encoding.Side(name, (rate,), (9.0,), (1.0,), 10**8, (digests.get(name, "a"),))
        for name, rate in named
    )
    whole = bench.Bench(SMALL, folder, folder, None, None)
    whole.results = report.Results(
        comparisons=[encoding.Comparison("prose", "llama", sides, 4.0)],
        scaling=encoding.Scaling(
            (1.95 * factors.get("workers", 1),), ((2.0, 1.0),), others, 0.2, 2
        ),
        indexing=[
            index.Indexing(
                index.DOCUMENTS // 10,
                index.TOKENS // 10,
                Usage(1, 10 + cpu, 10**9),
                Usage(1, 10.0, 10**9),
                1,
            )
        ],
        reads=[50_000.0],
    )
    verdicts = [figure.verdict for figure in whole.results.figures()]
    return bench.conclude(whole, bench.parse([])), [
        verdict for verdict in verdicts if verdict != report.Verdict.PASS
    ]


def test_a_run_fails_for_a_missed_target_or_other_bytes(tmp_path: Path) -> None:
    ours = peers.OURS.name
    assert conclude({}, {}, 2.9, 0.01, tmp_path) == (0, [])
    assert conclude({ours: 0.55}, {}, 2.9, 0.01, tmp_path) == (1, ["FAIL"] * 2)
    # The index has a tenth of the documents, so its limit is 3 s.
    assert conclude({ours: float("nan")}, {}, 3.1, 0.01, tmp_path) == (1, ["FAIL"] * 3)
    assert conclude({"workers": 0.8}, {}, 2.9, 0.01, tmp_path) == (1, ["FAIL"])
    # The machine was not idle.
    assert conclude({"workers": 0.8}, {}, 2.9, None, tmp_path) == (0, ["note"])
    assert conclude({}, {peers.PEER.name: "b"}, 2.9, 0.01, tmp_path) == (1, [])


def test_a_command_is_charged_for_its_children_and_a_failed_one_is_told(tmp_path: Path) -> None:
    held = "held = b'x' * (300 << 20)\nimport time\nwhile time.process_time() < 0.2: pass"
    usage = run(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])",
        ],
        tmp_path,
    )
    assert 0.2 <= usage.cpu < 60 and usage.wall > 0.1 and 300 << 20 <= usage.peak_bytes < 450 << 20
    with pytest.raises(BenchError, match=r"(?s)exit code 3.*so it is"):
        run([sys.executable, "-c", "import sys; print('so it is'); sys.exit(3)"], tmp_path)


def test_peers_of_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = peers.environment(Path(sys.prefix), tmp_path)
    assert peers.versions(python)["datatrove"] == peers.DATATROVE_VERSION
    monkeypatch.setattr(peers, "DATATROVE_VERSION", "0.0.1")
    with pytest.raises(UserError, match=r"needed: datatrove 0\.0\.1"):
        peers.versions(python)


def test_a_corpus_is_the_same_each_time_and_an_index_whole_in_any_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (corpus.make("code", 1, tmp_path / part) for part in "ab")
    assert (
        replace(second, folder=first.folder, tiny=first.tiny) == first
        and abs(first.text_bytes - 1e6) < 2e5
    )
    assert (
        abs(first.median_bytes / corpus.MEDIAN - 1) < 0.3
        and abs(first.mean_bytes / corpus.MEAN - 1) < 0.3
    )
    for chunk in (10_000, 333):
        monkeypatch.setattr(index, "CHUNK", chunk)
        tokens, made = (
            index.write_pair(tmp_path / "train", 1000),
            read_index(tmp_path / "train.idx"),
        )
        assert (
            len(made.lengths) == 1000
            and int(np.sum(made.lengths)) == tokens
            and (tmp_path / "train.bin").stat().st_size == 2 * tokens
        )
        np.testing.assert_array_equal(
            made.pointers[1:], 2 * np.cumsum(made.lengths, dtype=np.int64)[:-1]
        )
