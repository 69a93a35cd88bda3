"""Tests of data_prep's benchmark: its costs, comparisons and conclusions, not its durations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.encode.tokenizer import TokenizerFolder
from data_prep.prepared.indexed import read_index
from fem_common.errors import Fault
from tools.bench import data_prep as bench
from tools.bench.data_prep import Corpus, Cost, Side


@pytest.mark.slow
def test_a_run_finds_the_same_bytes_on_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SCRATCH", tmp_path / "scratch")
    out = tmp_path / "found.json"
    words = ["--quick", "--megabytes", "1", "--json", str(out)]
    assert bench.main(words, documents=30_000, vocab_size=1000) in (0, 1)
    found = json.loads(out.read_text())
    assert not [fault for fault in found["faults"] if "bytes" in fault]
    assert len(found["rates"]) == 5 and len(found["figures"]) == 5
    assert not list((tmp_path / "scratch").iterdir())


def conclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: float) -> int:
    """Return the exit code of a run with the given values.

    ours: rate of data_prep; others write other bytes if ``hash`` is given; cpu: of the index.
    """
    rates = dict.fromkeys(bench.pipelines(tmp_path, TOKENIZER, tmp_path), 3.0)
    rates |= {bench.OURS: changed.get("ours", 30.0), bench.FALLBACK: 4.0}
    sides = {name: Side([rate], [1.0], {"a"}) for name, rate in rates.items()}
    if "hash" in changed:
        sides[bench.PEER].hashes = {"b"}
    costs = iter([Cost(10.0, 10**9), Cost(10.0 + changed.get("cpu", 2.9), 10**9)])
    monkeypatch.setattr(bench, "index_cost", lambda *_: next(costs))
    figures = bench.index_figures(bench.DOCUMENTS // 10, 1, tmp_path)
    corpus = Corpus(tmp_path, tmp_path, 10, 10**6, 10**5)
    return bench.conclude(corpus, sides, [*bench.encoding_figures(sides), *figures], None)


TOKENIZER = TokenizerFolder(Path("tokenizer"), "</s>", 0, 1000, "")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, 0),
        ({"ours": 14.0}, 1),  # 4.7 times one call per document
        ({"ours": float("nan")}, 1),
        ({"cpu": 3.1}, 1),  # a tenth of the documents: at most 3 s
        ({"hash": 1.0}, 1),
    ],
)
def test_a_run_fails_for_a_missed_target_or_other_bytes(
    changed: dict[str, float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conclude(tmp_path, monkeypatch, **changed) == code


def test_a_command_s_cost_includes_its_children_and_a_failure_has_its_output(
    tmp_path: Path,
) -> None:
    held = "held = b'x' * (300 << 20)\nimport time\nwhile time.process_time() < 0.2: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    cost = bench.measured([sys.executable, "-c", code], tmp_path)
    assert 0.2 <= cost.cpu < 60 and 300 << 20 <= cost.peak_bytes < 450 << 20
    with pytest.raises(Fault, match=r"(?s)a command failed: .*so it is"):
        bench.measured([sys.executable, "-c", "print('so it is'); raise SystemExit(3)"], tmp_path)


def test_an_index_is_complete_in_any_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in (10_000, 333):
        monkeypatch.setattr(bench, "CHUNK", chunk)
        tokens = bench.write_pair(tmp_path / "train", 1000)
        made = read_index(tmp_path / "train.idx")
        assert len(made.lengths) == 1000 and int(np.sum(made.lengths)) == tokens
        assert (tmp_path / "train.bin").stat().st_size == 2 * tokens
        starts = 2 * np.cumsum(made.lengths, dtype=np.int64)[:-1]
        np.testing.assert_array_equal(made.pointers[1:], starts)
