"""Tests of curves in TensorBoard and Weights & Biases after a rewind and a resume, and of JSON
lines after an incomplete line.
"""

from __future__ import annotations

import json
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.report.history import History
from pretrain.report.loggers import _wandb_mode
from tests.pretrain.conftest import REWINDABLE, Command, back_to, spikes_at
from tests.ranks import PATIENCE


def wandb_records(file: Path) -> list[Any]:
    """Return the records of an offline run's file: LevelDB's log format after a header of 7
    bytes.
    """
    # Importing it takes a second, because it creates its classes at import.
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    data = file.read_bytes()
    at = 7
    full = b""
    found = []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        full, at = full + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # the complete record, or its last part
            found.append(messages.Record.FromString(full))
            full = b""
    return found


def history(file: Path, name: str) -> list[tuple[int, int, float]]:
    """Return wandb's own step, the metric ``step`` and the value for each row that contains the
    value.
    """
    found = []
    for record in wandb_records(file):
        row = {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        if name in row:
            found.append((row["_step"], row["step"], row[name]))
    return found


def run_of(file: Path) -> Any:
    """Return wandb's record of the run."""
    return next(record.run for record in wandb_records(file) if record.HasField("run"))


def test_curves_continue_after_a_rewind_and_a_resume(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spike at step 7 rewinds to step 4; the run ends at step 8, is resumed at step 6 and
    continues to step 10.

    TensorBoard has each step once, Weights & Biases (real, offline because no user is logged in)
    every logged value. An incomplete line after a power loss does not hide a record of
    metrics.jsonl and attempts.jsonl.
    """
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(pretrain.run_dir / "no-netrc"))
    monkeypatch.setenv("HOME", str(pretrain.run_dir))
    # Give its process more than the default 30 seconds to start.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(PATIENCE))
    spikes_at(monkeypatch, 7)
    settings = [*REWINDABLE, "train.on_spike=rewind", "optimizer.schedule=constant"]
    settings += ["log.interval=1", "log.tensorboard=true"]
    settings.append(
        "log.wandb={enabled: true, entity: us, group: g, tags: [a, b], job_type: pretraining}"
    )
    pretrain(*settings, "train.steps=8")
    assert (
        f"offline; upload with: wandb sync {pretrain.run_dir}/wandb/offline-run-*" in pretrain.out
    )
    back_to(pretrain.run_dir, 6)
    for name in ("metrics.jsonl", "attempts.jsonl"):
        with (pretrain.run_dir / name).open("a") as file:
            file.write('{"step": 9, "lo')
    pretrain(*settings, "train.steps=10")
    assert "resumed from" in pretrain.out and " at step 6" in pretrain.out

    lines = (pretrain.run_dir / "metrics.jsonl").read_text().splitlines()
    lines.remove('{"step": 9, "lo')
    report = [(line["step"], line["loss"]) for line in map(json.loads, lines) if "loss" in line]
    assert [step for step, _ in report] == [*range(1, 8), *range(5, 9), *range(7, 11)]
    attempts = (pretrain.run_dir / "attempts.jsonl").read_text().splitlines()
    assert [line for line in attempts if line.endswith("}")] == [
        attempts[0],
        attempts[2],
    ]
    assert json.loads(attempts[2])

    read = History.read(pretrain.run_dir)
    assert (read.returns, read.resumes) == (((7, 4), (8, 6)), (6,))

    events = EventAccumulator(str(pretrain.run_dir / "tensorboard"))
    events.Reload()
    # TensorBoard stores float32.
    last = dict(report)
    assert [
        (event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("loss")
    ] == [(n, last[n]) for n in range(1, 11)]

    files = sorted(pretrain.run_dir.glob("wandb/offline-run-*/*.wandb"))
    logged = [history(file, "loss") for file in files]
    steps_and_losses = [[row[1:] for row in rows] for rows in logged]
    assert steps_and_losses == [report[:11], report[11:]], "nothing is dropped"
    assert all(rows == sorted(rows) for rows in logged), "wandb's own step only grows"
    first, second = map(run_of, files)
    assert first.run_id == second.run_id == (pretrain.run_dir / "wandb_id").read_text()
    assert (first.entity, first.run_group, first.job_type, [*first.tags]) == (
        "us",
        "g",
        "pretraining",
        ["a", "b"],
    )
    metrics = {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in wandb_records(files[1])
    }
    assert metrics["*"] == "step"
    (alert,) = [record.alert for record in wandb_records(files[0]) if record.HasField("alert")]
    assert alert.title == "spike" and alert.text.startswith("step 7, a spike: loss")


def test_credentials_of_a_server_of_ones_own_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wandb's own rules: credentials only for another server mean offline, and WANDB_MODE has
    precedence.
    """
    import wandb

    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine localhost:8080 login user password {'0' * 40}\n")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(netrc))
    found = {}
    for server, mode in (
        ("localhost:8080", ""),
        ("localhost:8081", ""),
        ("localhost:8080", "offline"),
    ):
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{server}")
        (
            monkeypatch.setenv("WANDB_MODE", mode)
            if mode
            else monkeypatch.delenv("WANDB_MODE", raising=False)
        )
        wandb.teardown()
        found[server, mode] = _wandb_mode()
    wandb.teardown()
    assert [*found.values()] == ["online", "offline", "offline"]
