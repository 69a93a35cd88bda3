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
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fem_common import cli
from fem_common.exits import Exit

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
