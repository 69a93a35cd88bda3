"""The output of ``python -m tools.tokens`` equals the samples of Megatron's dataset and of
training, in both directions.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.prepared.document_ids import IdsWriter, lines_at
from data_prep.prepared.indexed import read_index
from fem_common.config import dump_yaml
from pretrain.config import load_run
from pretrain.data.datasets import _counted, batches, build_datasets
from pretrain.data.facts import check_contents
from pretrain.data.store_reader import StoreReader
from pretrain.validate import prepare
from tests.one_process import megatron_of_one_process
from tests.pretrain.conftest import DEMO, SMALL, Command, settings, tiny_data
from tests.pretrain.conftest import pretrain as pretrain_command
from tests.pretrain.data_folder import write_folder, write_mask
from tests.pretrain.test_stages import STAGED
from tests.tools.refusals import Refused, refused
from tools.tokens.__main__ import main
from tools.tokens.steps import Steps, read_run

__all__ = ["pretrain_command", "refused", "settings", "tiny_data"]

Rows = Callable[..., list[dict[str, Any]]]
STEPS, BATCH, LENGTH = 20, 4, 32


@pytest.fixture
def rows_of(capsys: pytest.CaptureFixture[str]) -> Rows:
    """Output of ``tools.tokens ... --json``."""

    def run_tool(*arguments: object) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_tool


def write_data(folder: Path, name: str, seed: int) -> Path:
    """Write a data folder with ids: documents longer than two sequences, many with a few tokens,
    and one id that other folders have too.
    """
    drawn = random.Random(seed)
    limits = [(70, 100)] * 3 + [(1, 5)] * 60 + [(20, 40)] * 9
    lengths = [drawn.randint(least, most) for least, most in limits]
    drawn.shuffle(lengths)
    documents = [[drawn.randrange(499) for _ in range(length)] for length in lengths]
    write_folder(folder, documents=documents)
    manifest = json.loads((folder / "manifest.json").read_text())
    writer = IdsWriter(folder / "train.ids")
    own = [f"{name}-{number}".encode() for number in range(1, len(lengths))]
    writer.add([b"shared\nid", *own])
    manifest["splits"]["train"]["ids"] = vars(writer.finish())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "train"


def begin(run_dir: Path, prefixes: list[Path], packing: str = "stream") -> Any:
    """Return a run directory before its first step, with its index cache, and the training
    dataset.
    """
    blend = ", ".join(
        f"{{prefix: {prefix}, weight: {weight}}}"
        for prefix, weight in zip(prefixes, (3, 1), strict=False)
    )
    words = [
        *SMALL,
        f"data.train=[{blend}]",
        "data.valid=[]",
        "data.test=[]",
        f"train.steps={STEPS}",
        f"run_dir={run_dir}",
    ]
    words.append(f"data.packing={packing}")
    prepared = prepare(load_run(DEMO, words), 1)
    assert prepared.facts is not None
    built = build_datasets(
        prepared.config,
        vocab_size=500,
        eod_id=499,
        contents=check_contents(prepared.facts),
        train_samples=STEPS * BATCH,
        default_cache=run_dir / "index_cache",
        log=lambda _: None,
        reader=StoreReader(prepared.config),
    )
    (run_dir / "config.yaml").write_text(dump_yaml(prepared.config))
    (run_dir / "environment.json").write_text(
        json.dumps({"packages": {"megatron-core": version("megatron-core")}})
    )
    return built.train


@pytest.fixture
def groups() -> Iterator[None]:
    with megatron_of_one_process():
        yield


def tokens_of(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return sample -> the tokens of its rows, read from the .bin; offsets must be within their
    documents.
    """
    texts = {}
    for prefix in {row["source"] for row in rows}:
        index = read_index(Path(f"{prefix}.idx"))
        texts[prefix] = np.split(
            np.fromfile(f"{prefix}.bin", index.dtype), np.cumsum(index.lengths)[:-1]
        )
    found: dict[int, list[int]] = {}
    for row in rows:
        document = texts[row["source"]][row["document"]]
        assert 0 <= row["from"] < row["to"] <= len(document), row
        found.setdefault(row["sample"], []).extend(document[row["from"] : row["to"]].tolist())
    return found


# These cases test every sixth document; the slow ones test all.
QUICK = [(2, "stream"), (1, "best_fit")]


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("sources", "packing"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "stream"), (2, "best_fit"))),
    ],
)
def test_a_steps_pieces_are_the_datasets_tokens_and_a_documents_steps_the_way_back(
    tmp_path: Path, rows_of: Rows, sources: int, packing: str
) -> None:
    """Over the boundaries of epochs: 80 samples of data with 28."""
    prefixes = [
        write_data(tmp_path / name, name, seed)
        for seed, name in enumerate(("one", "two")[:sources])
    ]
    size = prefixes[-1].with_suffix(".bin").stat().st_size // 2
    write_mask(prefixes[-1].parent, "train", bytes(random.Random(2).choices((0, 1), k=size)))
    dataset = begin(tmp_path / "run", prefixes, packing)
    steps = [rows_of(tmp_path / "run", "--step", step) for step in range(1, STEPS + 1)]
    for n, step in enumerate(steps):
        assert sorted({row["sample"] for row in step}) == list(range(4 * n, 4 * n + 4))
    rows = [row for step in steps for row in step]
    assert [row["step"] for row in rows] == [1 + row["sample"] // BATCH for row in rows]
    assert not any(row["seen"] for row in rows)
    read = tokens_of(rows)
    assert list(read) == list(range(STEPS * BATCH))
    for sample, tokens in read.items():
        flagged = dataset[sample]["tokens"]
        text = _counted(dataset[sample])["tokens"].tolist()
        assert tokens == text[: len(tokens)] and not any(text[len(tokens) :])
        counted = sum(row["counted"] for row in rows if row["sample"] == sample)
        assert counted == (flagged[: len(tokens)] < 500).sum()
    assert packing == "best_fit" or all(len(tokens) == LENGTH for tokens in read.values())
    assert {row["source"] for row in rows} == set(map(str, prefixes))
    by_sample = {sample: list(group) for sample, group in groupby(rows, lambda row: row["sample"])}
    assert rows_of(tmp_path / "run", "--sample", 33) == by_sample[33]

    def where(**wanted: object) -> list[dict[str, Any]]:
        return [row for row in rows if wanted.items() <= row.items()]

    for number in range(72)[:: 6 if (sources, packing) in QUICK else 1]:
        assert rows_of(tmp_path / "run", "--document", number) == where(document=number)
    for name in ("one-1", "one-70", "two-3")[: 1 + sources]:
        found = rows_of(tmp_path / "run", "--find", name)
        assert found
        assert found == where(id=name)
        assert {(row["source"], row["document"]) for row in found} == {
            (str(tmp_path / name[:3] / "train"), int(name[4:]))
        }
    shared = rows_of(tmp_path / "run", "--find", "shared\nid")
    assert shared == rows_of(tmp_path / "run", "--find", r"shared\nid") == where(document=0)
    assert shared and {row["id"] for row in shared} == {r"shared\nid"}


@pytest.mark.usefixtures("groups")
def test_without_the_data_numbers_stand_and_another_runs_cache_is_not_taken(
    tmp_path: Path, rows_of: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_data(tmp_path / "one", "one", 0)
    begin(tmp_path / "run", [prefix])
    full = rows_of(tmp_path / "run", "--step", 3)
    begin(tmp_path / "other", [write_data(tmp_path / "two", "two", 1)])
    for cache in (tmp_path / "other" / "index_cache").iterdir():
        if cache.is_dir():
            cache.rename(tmp_path / "run" / "index_cache" / cache.name)
    assert rows_of(tmp_path / "run", "--step", 3) == full
    index = prefix.with_suffix(".idx")
    for anew in (False, True):
        index.unlink(missing_ok=True)
        if anew:
            shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
        assert main([str(tmp_path / "run"), "--step", "3", "--json"]) == 0
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()]
        assert err.count("\n") == 1 and str(index) in err
        for sample, group in groupby(zip(rows, full, strict=True), lambda pair: pair[0]["sample"]):
            *inner, (last, output) = group
            assert last == {**output, "id": None} and sample == output["sample"]
            assert all(
                row == {**output, "id": None, "to": None, "counted": None} for row, output in inner
            )
    assert main([str(tmp_path / "run"), "--step", "3"]) == 0
    header = capsys.readouterr().out.splitlines()[0].split()
    assert header == "step sample seen source document from to counted id".split()


@pytest.mark.usefixtures("groups")
def test_a_copied_run_with_relative_paths_reads_the_copied_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, the run's absolute path is used, with a note."""
    first, copied = tmp_path / "first", tmp_path / "copied"
    write_data(first / "one", "one", 0)
    monkeypatch.chdir(first)
    begin(Path("run"), [Path("one/train")])
    shutil.copytree(first, copied)
    for folder, run, source in ((copied, "run", copied), (tmp_path, "copied/run", first)):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert main([run, "--step", "1", "--json"]) == 0
        out, err = capsys.readouterr()
        sources = {json.loads(line)["source"] for line in out.splitlines()}
        assert sources == {str(source / "one/train")}
        assert err.count("\n") == (source == first) and (not err or str(folder) in err)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of all samples that training reads, in order."""
    read: list[list[int]] = []

    def noting(dataset: Any, *rest: Any) -> Iterator[Any]:
        for batch in batches(dataset, *rest):
            if dataset.index_split.name == "train":
                read.extend(batch["tokens"].tolist())
            yield batch

    monkeypatch.setattr("pretrain.trainer.batches", noting)
    return read


def test_of_a_run_whose_batch_changed(
    pretrain_command: Command, tiny_data: Path, rows_of: Rows, read: list[list[int]]
) -> None:
    """All steps together equal the samples that the loop read: 6 steps of 4, then of 8."""
    pretrain_command("train.steps=6")
    pretrain_command("train.steps=9", "train.global_batch_size=8")
    steps = [rows_of(pretrain_command.run_dir, "--step", step) for step in range(1, 10)]
    for n, step in enumerate(steps):
        assert len({row["sample"] for row in step}) == (4 if n < 6 else 8)
    rows = [row for step in steps for row in step]
    assert list(tokens_of(rows).values()) == read and all(row["seen"] for row in rows)
    for row in rows[:: len(rows) // 9]:
        ids = lines_at(tiny_data / "train.ids", [row["document"]])
        assert row["id"] == ids[row["document"]].rstrip() and row["id"].startswith("doc-")
        assert row in rows_of(pretrain_command.run_dir, "--find", row["id"])


@pytest.mark.parametrize("packing", ["stream", pytest.param("best_fit", marks=pytest.mark.slow)])
def test_of_stages_each_with_its_own_order(
    pretrain_command: Command, rows_of: Rows, read: list[list[int]], refused: Refused, packing: str
) -> None:
    """Three stages with two lengths; best_fit's last tokens are padding. The result does not depend
    on checkpoints.
    """
    pretrain_command(*STAGED, f"data.packing={packing}")
    run = pretrain_command.run_dir
    rows = [row for step in range(1, 11) for row in rows_of(run, "--step", step)]
    wanted: list[str] = []
    for stage, count in (("ramp", 6), ("main", 16), ("decay", 12)):
        wanted += [f"{stage}:{n}" for n in range(count)]
    assert list(dict.fromkeys(row["sample"] for row in rows)) == wanted
    found = list(tokens_of(rows).values())
    assert all(
        tokens == text[: len(tokens)] and not any(text[len(tokens) :])
        for tokens, text in zip(found, read, strict=True)
    )
    assert all(row["seen"] for row in rows)
    for row in rows[:: len(rows) // 6]:
        assert row in rows_of(run, "--sample", row["sample"])
        assert row in rows_of(run, "--find", row["id"])
    for words in (("--step", 11), ("--sample", "main:16"), ("--sample", 3)):
        refused(main, "tools.tokens", run, *words)
    shutil.rmtree(run / "checkpoints")
    assert [row for step in range(1, 11) for row in rows_of(run, "--step", step)] == rows


def test_of_a_fork_with_an_order_of_its_own(
    pretrain_command: Command, rows_of: Rows, read: list[list[int]], tmp_path: Path
) -> None:
    """A fork of the fork continues in that order."""
    pretrain_command("train.steps=4")
    child = tmp_path / "child"
    grandchild = tmp_path / "grandchild"
    start = len(read)
    pretrain_command(
        "train.steps=7",
        "data.seq_length=48",
        "--fork",
        str(child),
        config=str(pretrain_command.run_dir),
    )
    pretrain_command("train.steps=9", "--fork", str(grandchild), config=str(child))
    for anew in (False, True):
        runs = {5: child, 6: child, 7: child, 8: grandchild, 9: grandchild}
        rows = [row for step, run in runs.items() for row in rows_of(run, "--step", step)]
        assert list(dict.fromkeys(row["sample"] for row in rows)) == list(range(20))
        assert list(tokens_of(rows).values()) == read[start:]
        for run in () if anew else (child, grandchild):
            shutil.rmtree(run / "checkpoints")


@pytest.mark.slow
def test_of_a_run_of_tokens_whose_batch_changed(pretrain_command: Command) -> None:
    """12 steps of 4 samples' tokens, six of them done, continue in steps of 8: 3 more. Only the
    checkpoint records the change.
    """
    tokens = ("train.steps=null", f"train.tokens={48 * LENGTH}")
    pretrain_command("train.steps=6")
    pretrain_command(*tokens, "train.global_batch_size=8")
    shutil.rmtree(pretrain_command.run_dir / "checkpoints" / "step_00000009")
    (pretrain_command.run_dir / "metrics.jsonl").unlink()
    (pretrain_command.run_dir / "progress.json").unlink()
    (record,) = read_run(pretrain_command.run_dir)
    assert record.steps.points == [(0, 0), (6, 24), (8, 40), (9, 48)] and record.order_samples == 48


def test_where_nothing_states_when_the_batch_changed_no_step_is_made_up(
    pretrain_command: Command, refused: Refused
) -> None:
    run_dir = pretrain_command.run_dir
    run_dir.mkdir()
    config = load_run(DEMO, [*SMALL, "train.steps=30", "train.global_batch_size=4"])
    (run_dir / "config.yaml").write_text(dump_yaml(config))
    assert read_run(run_dir)[0].steps == Steps([(0, 0), (30, 120)], {4}, 0)

    def metrics(steps: list[tuple[int, int]]) -> str:
        return "".join(
            json.dumps({"step": step, "consumed_tokens": LENGTH * samples}) + "\n"
            for step, samples in steps
        )

    (run_dir / "attempts.jsonl").write_text(
        '{"pid": 1}\n{"changed": {"train.global_batch_size": [8, 4]}}\n'
    )
    # A kill after step 4 discarded the steps after the checkpoint of step 2.
    (run_dir / "metrics.jsonl").write_text(
        metrics([(1, 8), (2, 16), (3, 24)])
        + '{"step": 4, "con\n'
        + metrics([(4, 32), (3, 20), (5, 28)])
        + '{"step": 6, "cons'
    )
    steps = read_run(run_dir)[0].steps
    assert steps == Steps([(0, 0), (1, 8), (2, 16), (3, 20), (5, 28), (30, 128)], {4, 8}, 5)
    assert [steps.samples(step) for step in (2, 3, 5, 6)] == [
        range(8, 16),
        range(16, 20),
        range(24, 28),
        range(28, 32),
    ]
    assert all(steps.of(sample) == step for step in range(1, 31) for sample in steps.samples(step))
    (run_dir / "metrics.jsonl").write_text(metrics([(1, 8), (10, 60)]))
    assert read_run(run_dir)[0].steps.of(30) is None and read_run(run_dir)[0].steps.of(60) == 11
    refused(main, "tools.tokens", run_dir, "--step", 5)


@pytest.mark.usefixtures("groups")
def test_mistakes_are_one_line(tmp_path: Path, refused: Refused) -> None:
    run_dir = tmp_path / "run"
    prefix = write_data(tmp_path / "one", "one", 0)
    refused(main, "tools.tokens", run_dir, "--step", 1)
    begin(run_dir, [prefix])
    for words in (
        ("--step", 0),
        ("--step", 21),
        ("--step", "one"),
        ("--sample", 80),
        ("--find", "two-1"),
        ("--document", 72),
        (),
    ):
        refused(main, "tools.tokens", run_dir, *words)
    manifest = tmp_path / "one" / "manifest.json"
    output = json.loads(manifest.read_text())
    del output["splits"]["train"]["ids"]
    manifest.write_text(json.dumps(output))
    refused(main, "tools.tokens", run_dir, "--find", "one-1")
    (cache,) = (folder for folder in (run_dir / "index_cache").iterdir() if folder.is_dir())
    sample_index = next(cache.glob("*-sample_index.npy"))
    sample_index.write_bytes(sample_index.read_bytes()[:-8])
    refused(
        main,
        "tools.tokens",
        run_dir,
        "--step",
        1,
        CACHE=cache.name,
        KEY=sample_index.name.partition("-")[0],
    )
    sample_index.unlink()
    cache.rename(tmp_path / "cache")
    refused(main, "tools.tokens", run_dir, "--step", 1)
    (run_dir / "config.yaml").write_text(
        dump_yaml(load_run(run_dir / "config.yaml", [f"data.index_cache={tmp_path / 'elsewhere'}"]))
    )
    refused(main, "tools.tokens", run_dir, "--step", 1)
    (run_dir / "environment.json").unlink()
    refused(main, "tools.tokens", run_dir, "--step", 1)
    assert torch.distributed.is_initialized()
