"""Tests of the documents: every command in them exists and accepts its arguments; every
configuration loads and validates.

A command is checked without running it, except for plans: its own argument parser reads it, and
make performs a dry run. Commands are the lines of ```sh blocks, which must all be supported by this
test, and indented lines that begin with one of our launchers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fem_common import cli
from fem_common.errors import ConfigError
from fem_common.fem import COMMANDS as COMMANDS_OF_FEM
from pretrain.config import RunConfig, load_run
from pretrain.plan.run_plan import make_plan, render
from pretrain.run_directory import run_directory
from pretrain.validate import planned_world_size, prepare, validate
from tests.ranks import forked
from tests.test_house import ROOT, project, texts
from tests.wording import read_golden
from tools.scaling.planned_runs import plan_study
from tools.scaling.study import load_study


class Parsed(BaseException):
    """Raised in place of a command's work, after its arguments were parsed."""


def parse_alone(words: list[str]) -> None:
    """Run the real parser of a module or script on its words, ``["-m", "launch", …]``, in a process
    that ends with it.
    """
    sys.path.insert(0, "")

    def stopping(real: Any) -> Any:
        def parse(*given: Any, **more: Any) -> None:
            real(*given, **more)
            raise Parsed

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
    cli.parse = stopping(cli.parse)
    sys.argv[1:] = words[2:] if words[0] == "-m" else words[1:]
    with contextlib.suppress(Parsed):
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        sys.exit("it parses no arguments")


def commands_of(text: str) -> list[str]:
    """Return the command lines of a Markdown text, with continuation lines joined, without comments
    and prompts.
    """
    joined = re.sub(r"\\\n\s*", "", text)
    fenced: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```", joined, re.MULTILINE | re.DOTALL):
        fenced += block.splitlines()
    indented = re.findall(
        r"^ {4}((?:[\w./-]*/)?(?:python3?|torchrun|make|pip) .*)",
        re.sub(r"^```.*?^```", "", joined, flags=re.M | re.S),
        re.M,
    )
    lines = [re.sub(r"^\s*\$ ", "", line).strip() for line in [*fenced, *indented]]
    return [line for line in lines if line and not line.startswith("#")]


def fault(command: str) -> str | None:
    """Return the fault of a command line typed in the repository's root, or None."""
    program, *words = shlex.split(re.sub(r" > [\w./-]+$", "", command), comments=True)
    absent = [
        word
        for word in words
        if re.match(r"(configs|docs|tests|tools)/", word) and not (ROOT / word).exists()
    ]
    if absent:
        return f"there is no {absent[0]}"
    name = Path(program).name
    if name == "make":
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        }
        return ended(["make", "-n", *words, f"PYTHON={sys.executable}"], environment)
    if name == "pip" or (name.startswith("python") and words[:2] == ["-m", "pip"]):
        return _pip(words)
    if name == "torchrun":
        options = re.fullmatch(
            r"(?:--standalone )?--nproc-per-node (\d+) (-m .*)", shlex.join(words)
        )
        if not options:
            return "torchrun's options are not those of our documents"
        return _python(shlex.split(options[2]), int(options[1]))
    if name.startswith("python"):
        return _python(words, None)
    if name == "sbatch":
        wrapped = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--wrap"]
        return fault(wrapped[0]) if wrapped else "sbatch wraps no command"
    if name == "hf":  # the verb and the options exist
        known = subprocess.run(
            [str(Path(sys.executable).with_name("hf")), words[0], "--help"],
            capture_output=True,
            text=True,
        )
        missing = ", ".join(
            word for word in words if word.startswith("--") and word not in known.stdout
        )
        # It prints a hint about its news to stderr once a day.
        return missing or (known.stderr if known.returncode else None)
    if name == "fem":
        if words == ["--help"]:
            return None
        if words[0] not in COMMANDS_OF_FEM:
            return f"fem has no command {words[0]}"
        return _python(["-m", COMMANDS_OF_FEM[words[0]][0], *words[1:]], None)
    if name in ("cd", "cp", "git", "sed", "source", "transformers"):
        return None
    return f"{program} is not a command that this test understands"


def ended(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Return the output of a command that fails, or None."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return (done.stderr or done.stdout) if done.returncode else None


def _pip(words: list[str]) -> str | None:
    extras = set()
    for word in words:
        if listed := re.fullmatch(r"\.\[(.*)\]", word):
            extras |= set(listed[1].split(","))
    missing = [
        words[index + 1]
        for index, word in enumerate(words[:-1])
        if word == "-c" and not (ROOT / words[index + 1]).is_file()
    ]
    unknown = sorted(extras - set(project()["optional-dependencies"]))
    return ", ".join([*missing, *unknown]) or None


def _python(words: list[str], processes: int | None) -> str | None:
    if {"--plan", "--resolve", "--help", "--list-mixers", "--dry-run"} & set(words):
        return ended([sys.executable, *words])
    if words[:2] == ["-m", "pretrain"] and "--rehearse" not in words:
        return _pretrain(words[2:], processes)
    with (
        TemporaryDirectory() as folder,
        forked(1, parse_alone, words, output=Path(folder, "said")) as (process,),
    ):
        process.join()
        return Path(folder, "said.0").read_text() if process.exitcode else None


def _pretrain(words: list[str], processes: int | None) -> str | None:
    if "--fork" in words:
        at = words.index("--fork")
        words = [*words[:at], *words[at + 2 :], f"run_dir={words[at + 1]}"]
    if "--processes" in words:
        at = words.index("--processes")
        words, processes = [*words[:at], *words[at + 2 :]], int(words[at + 1])
    try:
        config = with_vocabulary(load_run(ROOT / words[0], words[1:]))
        validate(config, processes or 1)
    except ConfigError as error:
        return str(error)
    return None


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the configuration with a vocabulary, as if its data were prepared."""
    return replace(config, model=replace(config.model, vocab_size=config.model.vocab_size or 4096))


COMMANDS = {command: name for name, text in texts(".md").items() for command in commands_of(text)}


@pytest.mark.parametrize(("command", "document"), COMMANDS.items())
def test_a_documents_command(document: str, command: str) -> None:
    problem = fault(command)
    assert problem is None, f"{document}: {command}\n{problem}"


def trained_in(command: str) -> Path | None:
    """Return the run directory of a command that trains, None for others."""
    words = shlex.split(re.sub(r" > [\w./-]+$", "", command), comments=True)
    start = next(
        (
            at + 2
            for at in range(len(words))
            if words[at : at + 2] in (["-m", "pretrain"], ["fem", "pretrain"], ["launch", "local"])
        ),
        None,
    )
    if start is None or any(
        word.startswith("--") and word != "--processes" for word in words[start:]
    ):
        return None
    return run_directory(
        load_run(ROOT / words[start], [word for word in words[start + 1 :] if "=" in word])
    )


def test_no_command_of_a_document_finds_the_run_of_another_complete() -> None:
    """A reader types the commands of several pages one after the other."""
    places: dict[Path, str] = {}
    for name, text in texts(".md").items():
        for command in commands_of(text):
            place = trained_in(command)
            if place is not None:
                assert place not in places, (name, command, places[place])
                places[place] = name


def test_the_readme_begins_with_the_two_commands() -> None:
    commands = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands[:2] == ["make demo", "make test"]
    assert any("fem pretrain" in command and "--plan" in command for command in commands)


@pytest.mark.parametrize(
    "command",
    [
        "make dmo",
        "python -m pretrain configs/run/demo.yaml train.stps=20",
        "python -m pretrain configs/run/fem_sm_1.3b_100bt.yaml --plan model.hidden_sise=64",
        (
            "torchrun --nproc-per-node 3 -m pretrain configs/run/demo.yaml"
            " parallel.tensor_model_parallel_size=2"
        ),
        "python -m data_prep verfy data",
        (
            "python -m launch submit configs/run/demo.yaml --cluster"
            " configs/cluster/slurm_generic.yaml --nods 2"
        ),
        (
            "python -m launch submit configs/run/demo.yaml train.stps=20 --cluster"
            " configs/cluster/slurm_generic.yaml --dry-run"
        ),
        "sbatch --array=0-3 --wrap 'python -m data_prep runn --out data'",
        "python -m tools.hf export runs/demo/fem out --type fp32",
        "python -m pytest tests/test_nothing.py",
        "python tools/nothing.py",
        "pip install -c constraints.txt -e .[cpu]",
        "fem pretrain configs/run/demo.yaml train.stps=20",
        "fem curvs runs/demo/fem",
        "frobnicate now",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert fault(command)


def test_commands_are_found_in_markdown() -> None:
    text = (
        "```sh\n# why\nmake a \\\n    b=1\n\n$ cd x\n```\n```text\nmake no\n```\nwords\n\n   "
        " .venv/bin/python -m c\n    x = make y\n"
    )
    assert commands_of(text) == ["make a b=1", "cd x", ".venv/bin/python -m c"]


RUNS, STUDIES = (sorted((ROOT / "configs" / kind).glob("*.yaml")) for kind in ("run", "studies"))
# Cluster profiles belong to launch.
PARTS = sorted(
    path
    for path in ROOT.glob("configs/*/*.yaml")
    if path.parent.name not in ("run", "cluster", "studies")
)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_a_run_loads_validates_and_plans(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative data prefixes then name no file, independently of the data prepared in the working
    # tree.
    monkeypatch.chdir(tmp_path)
    prepared = prepare(with_vocabulary(load_run(run)), None, plan_only=True)
    assert prepared.world_size == planned_world_size(prepared.config)
    assert "total" in render(make_plan(prepared.config, prepared.world_size))
    assert prepared.config.name == run.stem


@pytest.mark.parametrize("part", PARTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_part_loads(part: Path) -> None:
    load_run(RUNS[0], [f"{part.parent.name}={part.stem}"])


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_plans_without_its_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = load_study(path)
    assert study.name == path.stem
    assert {run.variant for run in plan_study(study)} == set(study.variants)
    # Tracked files are written only on explicit request.
    assert Path(study.results).parts[0] == "runs"


def test_the_golden_file_is_of_tests_that_exist() -> None:
    for test in read_golden():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(
            encoding="utf-8"
        ), test
