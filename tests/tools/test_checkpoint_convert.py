"""Tests of checkpoints for another engine or optimizer: a run continues as if unchanged. Real runs,
real DeepSpeed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fem_common.files import sha256
from pretrain.__main__ import main as pretrain
from pretrain.checkpoint.folder import MANIFEST, hashes_of
from pretrain.checkpoint.reader import read_common
from tests.pretrain.conftest import DEMO, SMALL, tiny_data
from tests.pretrain.jobs import Job, run_jobs
from tests.ranks import VARIABLES, answer, losses
from tests.test_house import ROOT
from tests.tools.refusals import Refused
from tests.tools.refusals import refused as refused
from tests.wording import Wording
from tools.checkpoint.__main__ import main

__all__ = ["tiny_data"]

FROM, UNTIL = 3, 6
LARGER = ["model.num_layers=4", "train.global_batch_size=8"]
QUIET = (
    f"train.eval_interval=0 log.diagnostics_interval=0 train.steps={UNTIL}"
    f" checkpoint.interval={FROM}".split()
)
PLAIN = "parallel.use_distributed_optimizer=false"
SPLIT = "parallel.use_distributed_optimizer=true"
DEEPSPEED = ["engine.name=deepspeed", "engine.zero_stage=1"]
Run = tuple[str, Path, dict[int, Any]]


def train(base: list[str], run_dir: Path, *overrides: str) -> dict[int, tuple[float, float]]:
    """Run ``python -m pretrain`` and return step -> (loss, grad norm)."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    assert pretrain([DEMO, *base, f"run_dir={run_dir}", *overrides]) == 0
    return losses(run_dir)


def step_of(run_dir: Path, step: int = FROM) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """Return every tensor, read by torch."""
    reader, state = FileSystemReader(str(step)), dict[str, Any]()
    for name, kept in reader.read_metadata().state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            state[name] = torch.empty(kept.size, dtype=kept.properties.dtype)
    load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same(step: Path, other: Path) -> None:
    """Check that tensors, and the optimizer's groups and steps, are equal bit for bit."""
    ours, theirs = tensors(step), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert read_common(step) == read_common(other)


def convert(words: str) -> int:
    return main(["convert", *words.split()])


def altered(run_dir: Path, to: Path, contents: str | None = None, pipeline: int = 1) -> Path:
    """Return a copy of the run's third step (created on first use) with changes in its manifest."""
    step = step_of(to)
    if not step.exists():
        shutil.copytree(step_of(run_dir), step)
    manifest = json.loads((step / MANIFEST).read_text())
    manifest["files"] = {name: (step / name).stat().st_size for name in manifest["files"]}
    manifest["sha256"] = {name: sha256(step / name) for name in manifest["sha256"]}
    manifest |= {"contents": contents} if contents else {}
    for section in (manifest["layout"], manifest["config"]["parallel"]):
        section["pipeline_model_parallel_size"] = pipeline
    manifest["layout"]["world_size"] = pipeline
    (step / MANIFEST).write_text(json.dumps(manifest))
    return step


@pytest.fixture(scope="module")
def base(tiny_data: Path) -> list[str]:
    data = [f"data.{split}.0.prefix={tiny_data / split}" for split in ("train", "valid")]
    return [*data, "data.test=[]", *SMALL, *LARGER, *QUIET]


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def plain(
    request: pytest.FixtureRequest, base: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Precision, run directory and curve of a run of six steps with the plain optimizer and a
    checkpoint of the third step.
    """
    run_dir = tmp_path_factory.mktemp(request.param) / "plain"
    return request.param, run_dir, train(base, run_dir, PLAIN, f"train.precision={request.param}")


fp32_alone = pytest.mark.parametrize("plain", ["fp32"], indirect=True)


def test_the_distributed_optimizer_continues_where_the_plain_one_was_and_back(
    plain: Run,
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    precision, run_dir, wanted = plain
    split, back = tmp_path / "split", tmp_path / "back"
    capsys.readouterr()
    assert convert(f"{step_of(run_dir)} --engine megatron --out {split}") == 0
    output = capsys.readouterr()
    wording(output.out, RUN=run_dir)
    before, after = tensors(step_of(run_dir)), tensors(step_of(split))
    assert len(hashes_of(step_of(split))) == len(hashes_of(step_of(run_dir)))
    assert main(["verify", str(split)]) == 0
    weights = [name for name in before if not name.startswith("optimizer.")]
    assert output.err == "" and weights
    main_weight = "optimizer.state.fp32_param." if precision == "bf16" else ""
    for name in weights:
        assert torch.equal(before[name], after[name]), name
        if not name.startswith("rng."):
            copied = after[f"optimizer.state.param.{name}"]
            assert torch.equal(before[f"{main_weight}{name}"], copied), name

    goes_on = train(base, split, SPLIT, f"train.precision={precision}")
    assert sorted(goes_on) == list(range(FROM + 1, UNTIL + 1))
    # The same arithmetic on flat buffers instead of tensors: the fp32 sum of the norm is in a
    # different order.
    assert list(goes_on.values()) == [pytest.approx(wanted[step], rel=1e-6) for step in goes_on]

    assert convert(f"{step_of(split)} --engine megatron --plain-optimizer --out {back}") == 0
    assert_same(step_of(back), step_of(run_dir))
    assert train(base, back, PLAIN, f"train.precision={precision}") == {
        step: wanted[step] for step in range(FROM + 1, UNTIL + 1)
    }


@fp32_alone
def test_deepspeed_continues_where_megatron_was_and_back(
    plain: Run, base: list[str], tmp_path: Path
) -> None:
    """Starts from the plain optimizer; then DeepSpeed's file of the same step is converted to each
    of Megatron's.
    """
    _, run_dir, wanted = plain
    zero = tmp_path / "zero"
    rewritten = tmp_path / "rewritten"
    split = tmp_path / "split"
    back = tmp_path / "back"
    assert convert(f"{step_of(run_dir)} --engine deepspeed --out {zero}") == 0
    overrides = [*base, "train.precision=fp32", *DEEPSPEED]
    jobs = [
        Job("on", [*overrides, f"run_dir={tmp_path / 'on'}"], UNTIL - FROM, load=str(zero)),
        Job("same", [*overrides, f"run_dir={rewritten}"], 0, load=str(zero), save_after=0),
    ]
    steps = answer(1, run_jobs, jobs, str(tmp_path / "cache"), output=tmp_path / "rank")["on"].steps
    # An fp32 sum in a different order, as in tests/pretrain/test_deepspeed.py.
    assert steps == [pytest.approx(wanted[step], rel=1e-6) for step in range(FROM + 1, UNTIL + 1)]

    assert convert(f"{rewritten} --engine megatron --out {split}") == 0
    assert convert(f"{step_of(run_dir)} --engine megatron --out {tmp_path}/direct") == 0
    ours, theirs = tensors(step_of(split)), tensors(step_of(tmp_path / "direct"))
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("rng.")
    )
    assert convert(f"{rewritten} --engine megatron --plain-optimizer --out {back}") == 0
    assert train(base, back, PLAIN, "train.precision=fp32") == {
        step: wanted[step] for step in range(FROM + 1, UNTIL + 1)
    }


@fp32_alone
def test_weights_alone_stay_weights_alone(
    plain: Run,
    base: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    source, out = tmp_path / "imported", tmp_path / "out"
    step = altered(plain[1], source, contents="weights")
    capsys.readouterr()
    assert convert(f"{source} --engine deepspeed --out {out}") == 0
    wording(capsys.readouterr().out)
    assert_same(step_of(out), step)
    assert main(["show", str(out)]) == 0
    output = capsys.readouterr().out
    assert "contents    weights only, for checkpoint.load\n" in output
    assert "engine      deepspeed, converted from megatron with its plain optimizer\n" in output
    # A run cannot resume from it.
    assert pretrain([DEMO, *base, f"run_dir={out}", "train.precision=fp32"]) == 2
    assert "contains only weights" in capsys.readouterr().err


@fp32_alone
def test_what_is_refused(plain: Run, tmp_path: Path, refused: Refused) -> None:
    _, run_dir, _ = plain
    out, damaged, foreign = tmp_path / "out", tmp_path / "damaged", tmp_path / "foreign"
    step = altered(run_dir, damaged)
    (step / "__0_0.distcp").write_bytes(b"")
    common = read_common(step_of(run_dir))
    del common["optimizer"]["state"]
    torch.save(common, altered(run_dir, foreign) / "common.pt")
    altered(run_dir, foreign)
    (tmp_path / "file").write_text("")
    before = {file.name: sha256(file) for file in step_of(run_dir).iterdir()}
    size = (step_of(run_dir) / "__0_0.distcp").stat().st_size

    def refuse(words: str) -> None:
        refused(main, "tools.checkpoint", "convert", *words.split(), SIZE=size, RUN=run_dir)

    refuse(f"{tmp_path}/absent --engine megatron --out {out}")
    refuse(f"{run_dir} --engine deepspeed --plain-optimizer --out {out}")
    for source in (step, damaged, foreign):
        refuse(f"{source} --engine deepspeed --out {out}")
    for to in (run_dir, f"{run_dir}/checkpoints/new", f"{tmp_path}/file"):
        refuse(f"{run_dir} --engine deepspeed --out {to}")
    assert not out.exists()
    again = f"{step_of(run_dir)} --engine deepspeed --out {out}"
    assert convert(again) == 0
    refuse(again)
    # A later step of the same run.
    assert convert(f"{run_dir} --engine megatron --plain-optimizer --out {out}") == 0
    files = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert files == ["latest", "step_00000003", "step_00000006"]
    refuse(again)
    shutil.rmtree(out)
    assert {file.name: sha256(file) for file in step_of(run_dir).iterdir()} == before, (
        "the source is as it was"
    )


@fp32_alone
def test_unsupported_settings_are_reported_and_files_are_copied_if_links_fail(
    plain: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    step = altered(plain[1], tmp_path / "run", pipeline=2)

    def refuse(*given: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    capsys.readouterr()
    assert convert(f"{step} --engine deepspeed --out {tmp_path}/out") == 0
    output = capsys.readouterr()
    wording(output.err + output.out)
    shutil.rmtree(tmp_path / "run")
    assert len(tensors(step_of(tmp_path / "out"))) > 100


@fp32_alone
def test_show(
    plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    _, run_dir, _ = plain
    assert main(["show", str(run_dir)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    weights = [
        tensor
        for name, tensor in tensors(step_of(run_dir, UNTIL)).items()
        if not name.startswith(("optimizer.", "rng."))
    ]
    numbers = sum(tensor.numel() for tensor in weights)
    count, size = len(weights), numbers / 2**18  # MiB of fp32
    shown = f"""
checkpoint {step_of(run_dir, UNTIL)}
step 6
tokens 1,536 in 48 sequences of 32
model fem_softmax
engine megatron with its plain optimizer
layout 1 process = TP 1 x PP 1 x DP 1
precision fp32
weights {size:.1f} MiB: {count} tensors, {numbers:,} numbers, float32
optimizer {2 * size:.1f} MiB: {2 * count} tensors, {2 * numbers:,} numbers, float32
contents complete training state: a run can resume from it
files {lines["files"]}
undamaged yes: all file sizes and the hashes of all pickles match
"""
    assert lines == dict(line.split(maxsplit=1) for line in shown.strip().splitlines())
    step = altered(run_dir, tmp_path / "run")
    with (step / "common.pt").open("r+b") as file:
        file.write(b"x")
    assert main(["show", str(step)]) == 1
    fault = "undamaged   no: common.pt does not match the hash recorded when it was saved\n"
    assert fault in capsys.readouterr().out
    (step / ".metadata").unlink()
    assert main(["show", str(step)]) == 1
    out, err = capsys.readouterr()
    assert ".metadata is missing\n" in out and "optimizer   unknown\n" in out and err == ""
    (step / MANIFEST).unlink()
    refused(main, "tools.checkpoint", "show", step)
    # head closes the pipe after one line.
    command = (
        f"{sys.executable} -m tools.checkpoint show {run_dir} | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    bash = ["bash", "-c", command]
    done = subprocess.run(bash, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("checkpoint") and done.returncode in (0, 141)
    # Hints of libraries are allowed.
    assert not re.search("Error|Exception|Traceback", done.stderr), done.stderr


@fp32_alone
def test_verify(
    plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    """Detects one bit of one tensor in any of a run's checkpoints; `show` reads no tensor and does
    not detect it.
    """
    _, run_dir, _ = plain
    assert main(["verify", str(run_dir)]) == 0
    steps = list((run_dir / "checkpoints").glob("step_*"))
    assert capsys.readouterr().out.count(": undamaged, ") == len(steps)
    step = altered(run_dir, tmp_path / "run")
    file = max(step.glob("*.distcp"), key=lambda file: (file.stat().st_size, file.name))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["show", str(step)]) == 0
    capsys.readouterr()
    fault = f"{step}: damaged: {file.name}: the bytes do not match their checksum ("
    for given in (step, tmp_path / "run"):
        assert main(["verify", str(given)]) == 1
        assert capsys.readouterr().out.startswith(fault)
    content[len(content) // 2] ^= 1
    # Padding of the archive, which no checksum of a tensor covers.
    file.write_bytes(content.replace(b"ZZZZ", b"ZZZY", 1))
    assert main(["verify", str(step)]) == 1
    fault = f"{step}: damaged: {file.name} does not match the hash taken while it was written\n"
    assert capsys.readouterr().out == fault
    refused(main, "tools.checkpoint", "verify", tmp_path / "run" / "nothing")
