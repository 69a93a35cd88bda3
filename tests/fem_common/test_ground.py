"""Tests of shared code: atomic files, locks, the rule of mistakes, texts of times. Tests of the
configuration reader are in tests/pretrain.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from fem_common import text
from fem_common.cli import Parser
from fem_common.errors import ConfigError, InUse, from_os_error
from fem_common.exits import Exit
from fem_common.files import (
    append_json_line,
    locked,
    named_errors,
    read_lines,
    remove_leftovers,
    temporary,
    write_atomically,
)
from fem_common.progress import Progress


def test_a_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while the content is written: readers see the old file, and the next process
    removes the remains.
    """
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "fsync", lambda _: os._exit(9))
        write_atomically(path, "new and longer")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    ours = temporary(path)
    ours.write_text("being written")
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, ours])


def test_an_error_gets_the_files_name_and_keeps_its_text(tmp_path: Path) -> None:
    for error, message in (
        (OSError(errno.EFBIG, "too large"), f"too large: '{tmp_path}'"),
        (OSError(errno.EFBIG, "too large", "other"), "too large: 'other'"),
        (OSError("no number"), "^no number$"),
    ):
        with pytest.raises(OSError, match=message), named_errors(tmp_path):
            raise error


def test_half_a_line_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    """The file system accepts half a record (a file size limit, as on a full disk); the record of
    the next attempt is complete.
    """
    path, (soft, hard) = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_json_line(path, {"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 6, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_json_line(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for step in (3, 4):
        append_json_line(path, {"step": step})
    first, half, *rest = path.read_text().splitlines()
    assert (json.loads(first), half, [json.loads(line) for line in rest]) == (
        {"step": 1},
        '{"step',
        [{"step": 3}, {"step": 4}],
    )


def test_arguments_that_are_paths_expand_a_leading_tilde(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/folder/of/mine")
    parser = Parser(prog="x")
    parser.add_argument("--out", type=Path)
    assert parser.parse_args(["--out=~/x"]).out == Path("/folder/of/mine/x")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out=~nobody_here/x"])
    assert (
        "x: error: argument --out: ~nobody_here/x: there is no user 'nobody_here'"
        in capsys.readouterr().err
    )


def test_lines_end_at_lf_and_crlf_alone(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa\u2028b\u0085c\x0bd\x0ce\rf\r\n\n second\n".encode())
    assert read_lines(file) == ["a\u2028b\x85c\x0bd\x0ce\rf", "", " second"]
    file.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"prompts.txt: not a text file in UTF-8$"):
        read_lines(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_lines(tmp_path / "none")


def test_a_lock_keeps_another_process_out(tmp_path: Path) -> None:
    """The lock is released when its holder ends in any way, even if its children live on; shared
    locks coexist.
    """
    code = (
        "from pathlib import Path; from fem_common.files import locked\nwith"
        f" locked(Path({str(tmp_path / 'lock')!r})): print('held')"
    )

    def another() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        return done.stdout.strip() or done.stderr.strip().rsplit("\n", 1)[-1]

    with locked(tmp_path / "lock") as held:
        if (child := os.fork()) == 0:
            signal.pause()
            os._exit(0)
        there = another()
    after = another()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert held and "InUse" in there and after == "held"
    with (
        locked(tmp_path / "lock", shared=True),
        locked(tmp_path / "lock", shared=True),
        pytest.raises(InUse),
        locked(tmp_path / "lock"),
    ):
        pass


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *(
            (number, Exit.WRONG_INPUT)
            for number in (
                errno.ENOENT,
                errno.EEXIST,
                errno.EACCES,
                errno.EPERM,
                errno.ENOTDIR,
                errno.EISDIR,
            )
        ),
        *((number, Exit.FAULT) for number in (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EROFS)),
    ],
    ids=lambda value: errno.errorcode[value] if not isinstance(value, Exit) else value.name,
)
def test_a_wrong_path_is_a_mistake_and_all_else_the_file_systems(number: int, code: Exit) -> None:
    assert from_os_error(OSError(number, os.strerror(number), "folder/file")).code == code


def test_times_and_counts_in_words() -> None:
    seconds = (0, 59.6, 3599, 3600, 86399, 90000, float("inf"))
    assert [text.duration(value) for value in seconds] == [
        "0s",
        "1m 00s",
        "59m 59s",
        "1h 00m",
        "23h 59m",
        "1d 01h",
        "?",
    ]
    assert [text.count(value) for value in (999, 999_600, 1_234_567, 3e12)] == [
        "999",
        "1M",
        "1.23M",
        "3T",
    ]
    assert [text.size(value) for value in (999, 12_345, 4.56e9)] == ["999 B", "12.3 kB", "4.56 GB"]


def test_the_time_left_is_that_of_the_rate_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 130.0, 130.0, 130.0, 130.0, 130.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    progress = Progress(400, "rows", "merge", stream=StringIO())
    progress.done = 100
    assert progress.line() == "merge: 100 of 400 rows · 25% · 3/s · 1m 30s left"
