"""Result files in the format of tools.evaluate with given numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.evaluate.suite import Suite, SuiteTask


def write(folder: Path, model: str, name: str, value: float, **changes: Any) -> Path:
    """Write FOLDER/MODEL/NAME.json of a multiple-choice task with 100 questions and four choices,
    with ``changes``.
    """
    content = {
        "format": 1,
        "model": model,
        "model_key": f"key of {model}",
        "task": name,
        "label": name.upper(),
        "metric": "acc",
        "value": value,
        "stderr": 0.01,
        "raw": {},
        "chance": 0.25,
        "subtasks": {},
        "n": 100,
        "fewshot": 0,
        "version": "lm-eval 0.4.13, task version 1.0",
        "seconds": 1.5,
    }
    file = folder / model / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**content, **changes}), encoding="utf-8")
    return file


def write_heldout(
    folder: Path, model: str, losses: dict[int, float], tokens: int = 1000, **changes: Any
) -> Path:
    """Write FOLDER/MODEL/valid.json: nats per token by context length; bits per byte are a third of
    them.
    """
    contexts = {
        str(length): {
            "nats_per_token": loss,
            "bits_per_byte": loss / 3,
            "tokens": tokens,
            "context": length,
            "stride": length,
            "per_document": False,
            "data": ["data/valid"],
        }
        for length, loss in losses.items()
    }
    longest = str(max(losses))
    parts = {
        f"@{length}": {"value": loss, "stderr": 0.02, "n": 7, "chance": None}
        for length, loss in losses.items()
    }
    heldout = {
        "metric": "nats_per_token",
        "higher_is_better": False,
        "fewshot": None,
        "chance": None,
        "n": 7,
        "raw": {**contexts[longest], "contexts": contexts},
        "subtasks": parts if len(losses) > 1 else {},
        "version": "native held-out perplexity, format 1",
    }
    return write(folder, model, "valid", losses[max(losses)], **{**heldout, **changes})


def suite(*names: str, **changes: Any) -> Suite:
    """Return a suite of tasks with these names, each with the changes."""
    return Suite(
        "small",
        "",
        (),
        tuple(
            SuiteTask(**{"task": name, "name": name, "label": name.upper(), **changes})
            for name in names
        ),
    )
