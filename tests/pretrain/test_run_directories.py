"""Tests of starts in moved run directories and with unusual records in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from pretrain.__main__ import main
from pretrain.checkpoint.folder import MANIFEST, Found, Inherited, Progress, newest_good
from pretrain.checkpoint.manifest import NewerVersion, fault
from pretrain.checkpoint.resume import changes
from pretrain.config import load_run
from pretrain.report.progress_file import read_progress
from pretrain.run_directory import FORK, read_fork
from tests.pretrain.conftest import DEMO, SMALL, Command, data_of


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run with two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = [
        *data_of(tiny_data),
        *SMALL,
        "train.steps=2",
        "optimizer.warmup_steps=1",
        "checkpoint.interval=1",
        "log.diagnostics_interval=0",
    ]
    assert main([DEMO, f"run_dir={folder}", *words]) == 0
    return folder


@pytest.fixture
def moved(trained: Path, tmp_path: Path) -> Path:
    """A copy of it in another folder, as after a move."""
    return Path(shutil.copytree(trained, tmp_path / "moved"))


def test_a_moved_run_continues_where_it_is(
    pretrain: Command, moved: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.yaml is refused for every kind of start; the folder is accepted as a run."""
    before = sorted(trained.rglob("*"))
    for words in (
        [],
        ["train.steps=4"],
        ["--check"],
        ["--resolve"],
        ["--fork", str(moved.parent / "fork")],
    ):
        pretrain(*words, config=str(moved / "config.yaml"), code=2)
        (line,) = pretrain.err.splitlines()
        assert str(moved) in line and str(trained) in line and f"pretrain {moved};" in line
    monkeypatch.chdir(moved)
    pretrain(config="config.yaml", code=2)
    assert "resumed from checkpoints/step_00000002" in pretrain("train.steps=3", config=".")
    monkeypatch.chdir(moved.parent)
    pretrain("train.steps=4", config="moved")
    assert "resumed from moved/checkpoints/step_00000003" in pretrain.out
    # This is now the run's own configuration.
    assert "is complete at step 4" in pretrain("train.steps=4", config="moved/config.yaml")
    monkeypatch.chdir(moved)
    # run_dir is relative.
    assert str(moved / "moved") in pretrain.refused(config="config.yaml")
    assert "are two run directories" in pretrain.refused("run_dir=elsewhere", config=".")
    # An explicit request.
    pretrain("run_dir=elsewhere", "--check", config="config.yaml")
    assert "it has no config.yaml" in pretrain.refused(config=str(trained / "checkpoints"))
    assert sorted(trained.rglob("*")) == before


# A section in place of a value.
ODD: tuple[Any, ...] = (None, "x", -1, 2**70, 1.5, True, [], ["x"], {}, {"x": {}})


def mutated(record: dict[str, Any], deep: int = 4) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a JSON record with one key deleted, added, or changed, for every key."""

    def places(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(value, dict) and len(above) < deep:
            yield above
            for key, inner in value.items():
                yield from places(inner, (*above, key))

    for place in places(record, ()):
        holder = record
        for key in place:
            holder = holder[key]
        for key in [*holder, "added"]:
            values: tuple[Any, ...]
            if key == "added":
                values = ODD[:1]
            elif len(place) < 2:
                values = ("deleted", *ODD)
            else:
                values = ("deleted", -1, {"x": {}})
            for value in values:
                copy = deepcopy(record)
                inner = copy
                for step in place:
                    inner = inner[step]
                if value == "deleted":
                    del inner[key]
                else:
                    inner[key] = value
                yield f"{'.'.join((*place, key))} {value!r}", copy


def test_an_odd_manifest_is_a_checkpoint_or_passed_over(trained: Path) -> None:
    """No other outcome for any value of any key; an accepted manifest can be used."""
    path, config = trained / "checkpoints/step_00000002", load_run(trained / "config.yaml")
    good = json.loads((path / MANIFEST).read_text())
    wrong = dict[str, str | None]()
    for what, manifest in mutated(good):
        wrong[what] = fault(manifest, Progress, Inherited, 2)
        if wrong[what] is None:
            found = Found(path, manifest)
            assert found.progress.step == 2 and found.inherited.context_length >= 0
            if what.startswith("config"):
                changes(found.manifest["config"], config)
    newer = {what for what, found in wrong.items() if isinstance(found, NewerVersion)}
    added = {
        f"{record}{way}"
        for record in ("progress", "inherited")
        for way in (".added None", " {'x': {}}")
    }
    assert newer == {f"format {2**70}", *added}
    for key in (
        "progress",
        "data",
        "layout",
        "config",
        "files",
        "sha256",
        "config.model",
        "config.data",
        "config.train",
    ):
        assert wrong[f"{key} 'deleted'"] and wrong[f"{key} -1"], key
    never: tuple[Any, ...] = (None, -1, 2**70, 1.5, True, {})
    for key in good["progress"]:
        assert all(wrong[f"progress.{key} {value!r}"] for value in never), key
    # Older checkpoints lack progress.passed_over.
    assert wrong["progress.step 'deleted'"] and wrong["progress.passed_over 'deleted'"] is None
    for key in ("files", "sha256"):
        assert wrong[f"{key}..metadata 'deleted'"] and wrong[f"{key}.common.pt 'deleted'"]
    assert wrong["format 'x'"] and wrong["added None"] is None
    # Older checkpoints lack rng_device.
    assert wrong["rng_device -1"] and wrong["rng_device 'deleted'"] is None


@pytest.mark.parametrize(
    "text", ["[]", "null", "1", "[" * 100_000, '{"format": 1}', "\x00", '{"format": 1e999}']
)
def test_a_manifest_that_is_none_is_damage(moved: Path, text: str) -> None:
    step, damaged = moved / "checkpoints/step_00000002", dict[Path, str]()
    (step / MANIFEST).write_text(text)
    found = newest_good(step.parent, damaged)
    assert found is not None and found.progress.step == 1 and list(damaged) == [step]


def test_a_start_passes_over_an_odd_manifest_and_refuses_a_newer_one(
    pretrain: Command, moved: Path
) -> None:
    """The checkpoint of a newer version stays, and no training replaces it."""
    step = moved / "checkpoints/step_00000002"
    good = json.loads((step / MANIFEST).read_text())
    newer = good | {"progress": good["progress"] | {"history": []}}
    for manifest in (newer, good | {"format": 2}):
        (step / MANIFEST).write_text(json.dumps(manifest))
        before = sorted((moved / "checkpoints").rglob("*"))
        pretrain(config=str(moved), code=2)
        (line,) = pretrain.err.splitlines()
        assert f"checkpoint {step} was written by a newer version of this code" in line
        assert sorted((moved / "checkpoints").rglob("*")) == before
    (step / MANIFEST).write_text(json.dumps(good | {"progress": good["progress"] | {"step": 1}}))
    pretrain(config=str(moved))
    assert (
        f"checkpoint {step} is damaged ({MANIFEST} is for step 1, its folder for step 2); "
        "passing over it" in pretrain.out
    )
    assert f"resumed from {step.with_name('step_00000001')} at step 1" in pretrain.out


def test_odd_small_records_of_a_run_are_reported_in_a_line_or_not_read(moved: Path) -> None:
    fork = {"parent": "p", "checkpoint": "c", "step": 1, "order_begin": 0, "manifest_sha256": "x"}
    for what, record in mutated(fork):
        (moved / FORK).write_text(json.dumps(record))
        if what == "added None" or any(
            what == f"{key} 'x'" for key in ("parent", "checkpoint", "manifest_sha256")
        ):
            assert read_fork(moved) == record
        else:
            with pytest.raises(ConfigError, match=f"{moved / FORK} is damaged"):
                read_fork(moved)
    progress = json.loads((moved / "progress.json").read_text())
    for what, record in mutated(progress):
        (moved / "progress.json").write_text(json.dumps(record))
        report = read_progress(moved)
        assert report is None or (
            type(report["step"]),
            type(report.get("consumed_tokens", 0)),
            report["state"],
        ) == (int, int, "complete"), what
    for text in ("[]", "null", "{", "[" * 100_000):
        (moved / FORK).write_text(text)
        (moved / "progress.json").write_text(text)
        assert read_progress(moved) is None
        with pytest.raises(ConfigError, match="is damaged: restore it"):
            read_fork(moved)
