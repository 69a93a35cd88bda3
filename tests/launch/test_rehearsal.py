"""Tests of the rehearsal before a submission and its results. pretrain's results are simulated;
tests/pretrain has the real ones.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fem_common.errors import UserError
from launch.__main__ import main
from launch.cluster.profile import load_profile
from launch.job import rehearsal
from launch.job.item_state import Standing
from launch.job.plan import Draft
from tests.launch.folders import DEMO, LOCAL, SLURM, make_job
from tests.launch.hostile import program

TOO_MUCH = "h100 has 79 GiB of memory, and rank 1 needs 90.00 GiB: lower train.micro_batch_size"


class Answers:
    """Replacement of pretrain, with 2 GiB per rank; a micro-batch of 9 does not fit, and an
    offloaded optimizer is refused.
    """

    def __init__(self) -> None:
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, text: str, world_size: int, stop: str, *words: str, code: Path) -> str:
        config = yaml.safe_load(text)
        self.commands.append((stop, *words))
        too_much = TOO_MUCH if config["train"]["micro_batch_size"] == 9 else None
        if stop == "--check" and too_much:
            raise UserError(too_much)
        if stop != "--check" and config["engine"].get("offload_optimizer"):
            raise UserError("engine.offload_optimizer = true cannot be rehearsed")
        return json.dumps(
            {
                "excess": too_much,
                "ranks": [{"rank": rank, "peak": {"bytes": rank * 2**31}} for rank in range(2)],
            }
        )


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """The test's working directory, with a profile, a Slurm that accepts everything, and an
    immediate pretrain.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "slurm.yaml").write_text(SLURM.replace("gpus: 2", "gpus: 2, gres: gpu:h100:2"))
    program(tmp_path / "sbatch", "#!/bin/sh\necho 12\n")
    found = Answers()
    monkeypatch.setattr(rehearsal, "pretrain_text", found)
    monkeypatch.setattr(rehearsal, "_environment", lambda code: "code")
    return found


def config(device: str | None = None, **changed: Any) -> str:
    """Return the parts of a resolved run that the launcher reads; ``section_key=value``."""
    values: dict[str, Any] = {
        "name": "r",
        "run_dir": "/r",
        "model": {"num_layers": 2},
        "engine": {"name": "megatron"},
        "log": {"device": device},
        "train": {"micro_batch_size": 1, "seed": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    for key, value in changed.items():
        section, _, name = key.partition("_")
        values[section] = {**values[section], name: value} if name else value
    return yaml.safe_dump(values)


def rehearsed(*configs: str, profile: str = "slurm.yaml", data: bool = True) -> list[str]:
    """Return the messages about a job with these runs."""
    job, lines = make_job(Path.cwd() / "job", items=len(configs)), list[str]()
    job = replace(job, profile=load_profile(profile).as_json())
    every = tuple(range(len(configs)))
    texts = {item.directory: text for item, text in zip(job.items, configs, strict=True)}
    draft = Draft(job, texts, None, every, tuple(Standing(index, "idle") for index in every))
    rehearsal.rehearse(draft, lines.append, data=data)
    return lines


def test_a_layout_is_rehearsed_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = rehearsed(config())
    assert re.fullmatch(
        r"rehearsed in \d+s: r on 2 x h100: 2\.00 GiB at the peak of rank 1, the fullest", line
    )
    assert answers.commands == [("--json", "--rehearse", "--device", "h100")]
    alike = config(name="other", train_seed=2, optimizer_lr=1e-4)
    assert rehearsed(alike) == [
        "rehearsed before: other on 2 x h100: 2.00 GiB at the peak of rank 1, the fullest"
    ]
    others = [
        config(model_num_layers=3),
        config(train_micro_batch_size=2),
        config(optimizer_name="muon"),
        config("H200"),
    ]
    assert len(rehearsed(alike, *others, *others)) == 5 and len(answers.commands) == 5
    monkeypatch.setattr(rehearsal, "_environment", lambda code: "other code")
    assert rehearsed(alike)[0].startswith("rehearsed in") and len(answers.commands) == 6


def test_other_code_of_what_is_rehearsed_is_other_code(tmp_path: Path) -> None:
    found = []
    for folder in ("pretrain", "launch", "kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("")
        found.append(rehearsal._environment(tmp_path))
    assert found[0] == found[1] != found[2]


def test_what_does_not_fit_is_refused_again_without_a_rehearsal(answers: Answers) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=f"^r: {TOO_MUCH}; --no-rehearse"):
            rehearsed(config(train_micro_batch_size=9))
    assert len(answers.commands) == 1


def test_what_cannot_be_rehearsed_is_compared_by_its_plan(answers: Answers) -> None:
    engine: dict[str, Any] = {"engine_offload_optimizer": True}
    assert rehearsed(config(**engine)) == [
        "not rehearsed: engine.offload_optimizer = true cannot be rehearsed; by its plan r fits"
        " h100"
    ]
    assert answers.commands[1:] == [("--check", "--plan", 'log.device="h100"')]
    with pytest.raises(UserError, match=f"^r: {TOO_MUCH}; --no-rehearse"):
        rehearsed(config(**engine, train_micro_batch_size=9))
    assert rehearsed(config(**engine), data=False)[0].endswith(
        "; its memory is not compared either"
    )
    commands = len(answers.commands)
    assert (
        rehearsed(config("B200"))[0].endswith("names an H100 or H200; by its plan r fits B200")
        and len(answers.commands) == commands + 1
    )
    Path("cpu.yaml").write_text(LOCAL)
    assert (
        rehearsed(config("H100"), profile="cpu.yaml") == []
        and len(answers.commands) == commands + 1
    )


def test_the_gpu_is_named_by_the_run_or_else_by_the_profile() -> None:
    profile = load_profile("slurm_h100_ib")
    for device, path, found in (
        (None, "/x/slurm_h100_ib", "h100"),
        ("NVIDIA H200", "/x/slurm_h100_ib", "h200"),
        ("GH200", "/x/slurm_h100_ib", None),
        (None, "/x/mine.yaml", None),
    ):
        assert rehearsal.device_of({"log": {"device": device}}, profile, path) == found


def test_a_submission_is_refused_before_anything_is_written(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("base: slurm_h100_ib\nhealth: {check: false}\n")
    words = [
        *("submit", DEMO, "train.micro_batch_size=9", "train.global_batch_size=72"),
        *"model.vocab_size=1000 --cluster mine.yaml --dependency singleton --directory d".split(),
    ]
    assert main(words) == 2
    output = capsys.readouterr()
    assert (
        TOO_MUCH in output.err
        and output.err.count("\n") == 1
        and not Path("d/launch/job.json").exists()
    )
    assert main([*words, "--no-rehearse", "--parsable"]) == 0 and len(answers.commands) == 1
    assert capsys.readouterr().out == "12\n"
