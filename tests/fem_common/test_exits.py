"""Tests of the exit codes, equal in every command: a wrong path is 2, a failing file system is
1.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import gc
import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fem_common import cli
from fem_common.config import plain
from fem_common.exits import Exit
from pretrain.checkpoint.folder import MANIFEST, Progress
from pretrain.config import load_run
from tests.test_house import ROOT

# Command -> a command line whose first read or write is below FOLDER. The table leaves out commands
# without a path, and launch's doctor, which reports an unreadable profile like any check that fails
# (1).
COMMANDS: dict[str, list[str]] = {
    "pretrain": ["FOLDER/run.yaml"],
    "data_prep stdlib": ["FOLDER/text.parquet"],
    "data_prep train-tokenizer": [
        "FOLDER/text.parquet",
        "--vocab-size",
        "300",
        "--out",
        "FOLDER/tokenizer",
    ],
    "data_prep inspect": ["FOLDER/text.parquet"],
    "data_prep plan": [
        "FOLDER/text.parquet",
        "--tokenizer",
        "FOLDER/tokenizer",
        "--out",
        "FOLDER/out",
    ],
    "data_prep run": [
        "FOLDER/text.parquet",
        "--tokenizer",
        "FOLDER/tokenizer",
        "--out",
        "FOLDER/out",
    ],
    "data_prep status": ["FOLDER"],
    "data_prep merge": ["FOLDER"],
    "data_prep verify": ["FOLDER"],
    "data_prep stats": ["FOLDER"],
    "data_prep blend": ["FOLDER/blend.yaml", "FOLDER/a=1"],
    "launch submit": ["FOLDER/run.yaml", "--cluster", "FOLDER/cluster.yaml"],
    "launch local": ["FOLDER/run.yaml", "--cluster", "FOLDER/cluster.yaml"],
    "launch sweep": [
        "FOLDER/run.yaml",
        "--list",
        "FOLDER/runs.yaml",
        "--cluster",
        "FOLDER/cluster.yaml",
    ],
    "launch status": ["FOLDER"],
    "launch logs": ["FOLDER"],
    "launch cancel": ["FOLDER"],
    "launch requeue": ["FOLDER"],
    "launch.supervise": ["FOLDER"],
    "tools.evaluate": ["--list", "--suite", "FOLDER/suite.yaml"],
    "tools.evaluate.report": ["FOLDER"],
    "tools.evaluate.perplexity": ["FOLDER"],
    "tools.hf export": ["FOLDER", "FOLDER/out"],
    "tools.generate": ["FOLDER", "--file", "FOLDER/prompts"],
    "tools.checkpoint show": ["FOLDER"],
    "tools.scaling plan": ["FOLDER/study.yaml"],
    "tools.diagnose": ["FOLDER"],
    "tools.tokens": ["FOLDER", "--step", "1"],
    "tools.bench.cpu_suite": ["--compare", "FOLDER/earlier.json"],
    "tools.bench.data_prep": ["--corpus", "FOLDER"],
}
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO)


def run(command: str, folder: Path) -> int:
    """Return the exit code of a command's main in this process."""
    module, *verb = command.split()
    try:
        importlib.import_module(f"{module}.__main__")
    except ModuleNotFoundError:
        main = importlib.import_module(module).main
    else:
        main = importlib.import_module(f"{module}.__main__").main
    try:
        return int(
            main([*verb, *(word.replace("FOLDER", str(folder)) for word in COMMANDS[command])])
        )
    except SystemExit as end:
        return int(end.code or 0)


def fail(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Let every operating system call below ``folder`` fail with this error."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *arguments: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(folder)):
                raise OSError(number, os.strerror(number), os.fspath(path))
            return call(path, *arguments, **more)

        return wrapped

    of_os = [(os, name) for name in ("open", "stat", "lstat", "scandir", "listdir", "mkdir")]
    for owner, name in ((builtins, "open"), (io, "open"), *of_os):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_path_is_2_and_a_failing_file_system_1(
    tmp_path: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder"
    # This command creates the folder, which is impossible below a file.
    if command == "data_prep stdlib":
        folder.write_text("")
    assert run(command, folder) == Exit.WRONG_INPUT, capsys.readouterr().err
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and str(folder) in output
    for number in FAULTS:
        with monkeypatch.context() as patch:
            fail(patch, folder, number)
            assert run(command, folder) == Exit.FAULT, (
                errno.errorcode[number],
                capsys.readouterr(),
            )
        output = capsys.readouterr().err
        assert (
            output.count("\n") == 1
            and os.strerror(number) in output
            and str(folder.parent) in output
        ), output


SETTING_COMMANDS = (
    "pretrain",
    "launch submit",
    "launch local",
    "data_prep index",
    "tools.scaling coord-check",
    "tools.demo",
    "tools.layout",
    "tools.bench.engines",
)


@pytest.mark.parametrize("command", SETTING_COMMANDS)
def test_a_setting_with_dashes_is_refused_with_its_right_form(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *verb = command.split()
    main = importlib.import_module(f"{module}.__main__").main
    for words, form in (
        (["--train.steps=5"], "train.steps=5"),
        (["--train.steps", "5", "--help"], "train.steps=5"),
        (["--log.tensorboard", "--help"], "log.tensorboard=VALUE"),
        (["--model.pattern=[a, b]"], "'model.pattern=[a, b]'"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*verb, *words])
        error = capsys.readouterr().err
        assert end.value.code == Exit.WRONG_INPUT and error.count("\n") == 1
        assert f"; write {form} (see: " in error


@pytest.mark.parametrize(
    "command",
    [
        "pretrain run.yaml",
        "data_prep inspect text.txt",
        "kernels",
        "launch doctor",
        "tools.bench.cpu_suite",
        "tools.checkpoint show run",
        "tools.demo",
        "tools.evaluate.perplexity run",
        "tools.hf export run out",
        "tools.scaling plan study.yaml",
        "tools.tokens run",
    ],
)
def test_an_absent_package_is_one_line_that_names_make_setup(command: str) -> None:
    """With -S, Python finds its standard library and this repository, as one without packages."""
    program, *words = command.split()
    done = subprocess.run(
        [sys.executable, "-S", "-m", program, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == Exit.WRONG_INPUT and done.stdout == ""
    assert re.fullmatch(
        rf"{program}: error: \S+ has no package \w+; run `make setup` in {ROOT}, then "
        rf"{ROOT}/.venv/bin/python -m {program} \.\.\.\n",
        done.stderr,
    ), done.stderr


def test_an_absent_module_of_this_repository_keeps_its_traceback() -> None:
    code = "import fem_common.cli, fem_common.absent"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Traceback")


HEAVY = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code, *{"torch", "transformers", "megatron", "matplotlib"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    "command",
    [
        "tools.generate gone text",
        "tools.generate checkpoint text --tokenizer gone",
        "tools.hf export gone out",
        "tools.hf export checkpoint gone --tokenizer gone",
        "tools.hf export checkpoint folder",
        "tools.hf import gone out",
        "tools.hf import folder out",
        "tools.hf verify gone gone",
        "tools.hf verify checkpoint gone",
        "tools.hf verify checkpoint checkpoint --prompts gone",
        "tools.checkpoint convert gone --engine megatron --out out",
        "tools.checkpoint convert checkpoint --engine megatron --out checkpoint",
        "tools.checkpoint merge gone --out out",
        "tools.checkpoint merge --last 2 --of gone --out out",
        "tools.checkpoint merge checkpoint --out folder",
        "tools.checkpoint show gone",
        "tools.checkpoint verify gone",
        "tools.checkpoint mirror gone mirror",
        "tools.evaluate gone",
        "tools.evaluate.perplexity gone",
        "tools.evaluate.perplexity checkpoint --data gone",
        "tools.diagnose gone",
        "tools.diagnose checkpoint --data gone",
        "tools.tokens gone --step 1",
        "kernels gone",
        "tools.bench.traffic --model gone",
        "tools.bench.traffic --model transformer_1.3b --against gone",
    ],
)
def test_a_wrong_path_is_reported_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    write_checkpoint(tmp_path / "checkpoint" / "checkpoints" / "step_00000004")
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{Exit.WRONG_INPUT:d}\n", done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(command.split()[0])
    assert "gone" not in command or "gone" in done.stderr


@pytest.mark.parametrize("command", ["kernels", "tools.bench.mixers", "tools.bench.traffic"])
def test_help_is_printed_before_torch_is_imported(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("usage: ") and done.stdout.endswith("\n0\n"), done


def write_checkpoint(step: Path) -> None:
    """Write a checkpoint without tensors, which is undamaged for every check of its files."""
    config = plain(load_run(ROOT / "configs" / "run" / "demo.yaml"))
    manifest = {"progress": asdict(Progress(4, 16, 16)), "config": config, "data": ""}
    step.mkdir(parents=True)
    (step / MANIFEST).write_text(json.dumps({**manifest, "files": {}, "sha256": {}}))


FORKED = """
import os, signal
from fem_common.cli import signals_as_interrupt

with signals_as_interrupt():
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    child = os.fork()
    if child == 0:
        os._exit(0)
    raise SystemExit(os.waitpid(child, 0)[1] != signal.SIGTERM)
"""


def test_a_forked_worker_is_ended_by_the_first_signal() -> None:
    """Also by a signal that arrives while Python prepares the child, which swallows an exception at
    that point.
    """
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60).returncode == 0


FINALIZER = """
import os, signal, time
from fem_common.cli import run

class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(9):  # the exception of the handler is raised here at the latest
            pass

def main():
    Freed()
    time.sleep(30)

raise SystemExit(run("test", main))
"""


def test_a_signal_during_a_finalizer_ends_the_command() -> None:
    """Python swallows the exception there, and in callbacks of weak references."""
    done = subprocess.run(
        [sys.executable, "-c", FINALIZER], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 143 and "Exception ignored" not in done.stderr, done


def test_the_table_of_the_page_has_every_code() -> None:
    """Scripts and external launchers read the numbers in the table; KILLED is never a command's own
    code.
    """
    page = (Path(__file__).parents[2] / "fem_common" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    assert [int(code) for row in rows for code in row.split(",")] == [
        code for code in Exit if code is not Exit.KILLED
    ]


def test_requests_that_a_stop_cuts_off_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs the traceback of a failed request without a receiver when the request is
    freed.
    """
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", False)

    async def request() -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    def stopped() -> None:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    under_way = loop.create_task(request())
    loop.run_until_complete(asyncio.wait([under_way]))
    assert cli.run("copy", stopped) == 130
    del under_way
    gc.collect()
    loop.close()
    assert not caplog.records
