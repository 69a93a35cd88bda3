"""Held-out loss on data of another kind: documents without end-of-document tokens, and data that changed behind its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.store.indexed import IndexedWriter
from tests.tools.evaluate.tiny import llama_folder, opened
from tools.evaluate import results
from tools.evaluate.heldout import Kept, Settings, Sums, open_text
from tools.evaluate.perplexity import data_digest, heldout_result, measure
from tools.evaluate.suite import SuiteTask

NO_END = 250  # documents of the tests hold none of it, nor the tokenizer's end, 0


def write_pair(prefix: Path, lengths: tuple[int, ...] = (4, 4, 4), seed: int = 0, end: int | None = None) -> Path:
    ids = np.random.default_rng(seed).integers(1, NO_END, sum(lengths)).astype(np.uint16)
    if end is not None:
        ids[np.cumsum(lengths) - 1] = end
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, "uint16")
    writer.add(ids, np.array(lengths))
    writer.finish()
    return prefix


def column(prefix: Path) -> SuiteTask:
    return SuiteTask(task="held", name="held", kind="heldout", data=str(prefix), metric="nats_per_token", context_lengths=(8,))


def test_documents_whose_first_tokens_are_not_scored_are_documents() -> None:
    sums, starts = Sums(), np.array([0, 4, 8, 9, 9, 12])  # by hand: 3, 3, 0, 0 and 2 tokens of 1, 2 and 3 nats each
    for first, count, nats in ((1, 3, 1.0), (5, 3, 2.0), (10, 2, 3.0)):
        sums.add(first, np.full(count, nats), starts)
    found = sums.done()
    assert (found.documents, found.tokens, found.nats) == (3, 8, 15.0)
    assert found.nats_squared == 3.0**2 + 6.0**2 + 6.0**2


@pytest.mark.parametrize(("end", "tokens"), [(None, 9), (0, 11)])
def test_bits_a_byte_are_of_the_scored_tokens_or_none(tmp_path: Path, end: int | None, tokens: int) -> None:
    task = column(write_pair(tmp_path / "valid", end=end))
    raw = heldout_result(opened(), task, None, "key", per_document=True)["raw"]
    assert (raw["documents"], raw["tokens"], raw["unscored"]) == (3, tokens, 11 - tokens)
    assert (raw["bytes"] is None, raw["bits_per_byte"] is None) == (end is None, end is None)
    stream = heldout_result(opened(), task, None, "key")["raw"]
    assert (stream["documents"], stream["tokens"], stream["unscored"]) == (3, 11, 0) and stream["bytes"]


def test_sums_of_another_dtype_are_not_taken_over(tmp_path: Path) -> None:
    text, kept, model = open_text(write_pair(tmp_path / "valid")), Kept(tmp_path / "kept.json"), opened()
    wide = measure(model, text, Settings(8, 8), kept, "key")
    narrow = measure(replace(model, model=opened().model.bfloat16()), text, Settings(8, 8), kept, "key")
    assert len(kept.sums) == 2 and narrow.nats != wide.nats


def test_a_result_fits_the_tokens_not_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = results.Settings(None, None, None, None, "")

    def complaint(task: SuiteTask) -> str | None:
        return results.fitting(tmp_path, "model", "key", task, asked.of(task, data_digest(tmp_path, task)))

    task = column(write_pair(tmp_path / "valid"))
    made = {"format": results.FORMAT, "model_key": "key", "metric": task.metric, "settings": asked.of(task, data_digest(tmp_path, task))}
    results.write(tmp_path, "model", task, made)
    assert json.loads(results.result_file(tmp_path, "model", task).read_text())["settings"]["data_digest"]
    monkeypatch.chdir(tmp_path)
    assert complaint(task) == complaint(column(Path("valid"))) == "", "the same file"
    assert complaint(column(write_pair(tmp_path / "copy/valid"))) == "", "the same tokens elsewhere"
    model = llama_folder(tmp_path / "llama")
    (model / "training.json").write_text(json.dumps({"config": {"data": {"valid": [{"prefix": str(tmp_path / "copy/valid")}]}}}))
    assert data_digest(model, replace(task, data=None)) == data_digest(model, task), "the run's own validation data"
    write_pair(tmp_path / "valid", seed=1)
    assert "was made with data_digest" in (complaint(task) or "")
    for file in tmp_path.glob("valid.*"):
        file.unlink()
    assert complaint(task) == "", "where the data is not, its name has to do"
    assert "was made with data " in (complaint(column(Path("gone"))) or "")
