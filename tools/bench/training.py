"""Runs of ``python -m pretrain`` on generated tokens: their data, command and metrics."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SPLITS = ("train", "valid", "test")
DOCUMENTS, LONGEST = 2000, 400


def write_data(folder: Path, vocabulary: int) -> None:
    """Write .bin/.idx pairs of tokens that a model can learn, and a tokenizer folder.

    The only named token of the tokenizer is the end of a document.

    A token is 7 times the previous one plus noise, modulo the vocabulary size. The training split
    has 0.4 M tokens.
    """
    from data_prep.prepared.indexed import IndexedWriter, dtype_name

    end = vocabulary - 1
    folder.mkdir(parents=True)
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng(number)
        lengths = rng.integers(20, LONGEST, DOCUMENTS if split == "train" else DOCUMENTS // 10)
        ids = np.empty((len(lengths), LONGEST), np.int64)
        ids[:, 0] = rng.integers(0, end, len(lengths))
        for place in range(1, LONGEST):
            ids[:, place] = (7 * ids[:, place - 1] + rng.integers(0, 4, len(lengths))) % end
        ids[np.arange(len(lengths)), lengths - 1] = end
        writer = IndexedWriter(folder / split, dtype_name(vocabulary))
        writer.add(ids[np.arange(LONGEST) < lengths[:, None]], lengths)
        writer.finish()
    tokens = {
        "model": {"vocab": {f"t{number}": number for number in range(end)}},
        "added_tokens": [{"content": "</s>", "id": end}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>"}), encoding="utf-8"
    )


def command(
    run: Path | str,
    folder: Path,
    data: Path,
    steps: int,
    settings: Sequence[str],
    *,
    splits: Sequence[str] = SPLITS,
) -> list[str]:
    """Return the command of a run that records every step and writes no checkpoint before its end.

    run: YAML file of the run. folder: run directory. data: folder of `write_data`. settings:
    further ``section.key=value`` overrides.
    """
    return [
        *(sys.executable, "-m", "pretrain", str(run), f"run_dir={folder}"),
        f"data.tokenizer={data}",
        *(f"data.{split}=[{{prefix: {data / split}}}]" for split in splits),
        *("log.interval=1", "train.eval_interval=0", "checkpoint.interval=0"),
        f"train.steps={steps}",
        *settings,
    ]


def step_rows(folder: Path) -> dict[int, dict[str, float]]:
    """Return step -> line of the run's metrics.jsonl; the last line of a step counts.

    A loss that is not finite is NaN. Raises OSError or ValueError if the file cannot be read.
    """
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        int(row["step"]): {**row, "loss": math.nan if row["loss"] is None else row["loss"]}
        for row in lines
        if "loss" in row
    }
